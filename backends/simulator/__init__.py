"""A vLLM that needs no GPU: one engine for HTTP in real time and for replay in virtual time."""
