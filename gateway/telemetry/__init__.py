"""What the gateway tells of itself: series for Prometheus, and the log."""
