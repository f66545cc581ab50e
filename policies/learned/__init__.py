"""The `learned` policy: predicts the delay on each replica and learns from each outcome."""
