"""The `learned` policy, which predicts the delay on each backend and learns from each outcome."""
