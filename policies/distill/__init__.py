"""Turns what `learned` knows into rules for `thresholds`."""
