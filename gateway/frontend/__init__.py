"""The HTTP frontends: on our own HTTP server, and plain ASGI."""
