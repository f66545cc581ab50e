"""The relay: passes a request to one backend, and its answer back to the client."""
