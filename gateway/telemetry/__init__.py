"""Prometheus metrics, and the fallback for policies that fail."""
