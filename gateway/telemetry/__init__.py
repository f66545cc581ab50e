"""Series for Prometheus, and the log."""
