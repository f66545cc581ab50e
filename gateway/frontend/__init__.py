"""The HTTP frontends: plain ASGI, and uvicorn's protocol without ASGI in between."""
