"""Search for better numbers in the rules of `thresholds`."""
