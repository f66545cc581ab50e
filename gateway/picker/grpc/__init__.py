"""A gRPC server over asyncio protocols: HTTP/2 in clear text, as far as gRPC needs it."""
