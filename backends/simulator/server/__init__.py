"""A simulated replica's HTTP server, which speaks as vLLM does."""
