"""Starts, supervises and stops `vllm serve`."""
