"""Latency objectives of requests, and how many are served in time."""
