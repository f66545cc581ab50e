"""A simulator of vLLM that needs no GPU, behind HTTP in real time or replaying traces in virtual time."""
