"""The HTTP server for clients: requests and their heads, paths, replies, and CORS."""
