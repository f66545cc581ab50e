"""Metrics, and the fallback for policies that fail."""
