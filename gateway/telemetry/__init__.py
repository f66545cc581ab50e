"""What the gateway tells of itself: series for Prometheus, spans, logs; and the fallback for policies that fail."""
