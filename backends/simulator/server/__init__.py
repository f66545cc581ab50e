"""The HTTP server of a simulated replica, compatible with vLLM's."""
