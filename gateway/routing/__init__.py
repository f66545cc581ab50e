"""From a request's head and body to the replica that serves it."""
