"""Estimates the GPU memory that a replica needs for weights and KV cache."""
