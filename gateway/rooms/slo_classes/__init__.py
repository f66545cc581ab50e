"""Latency objectives of requests, and how many are kept."""
