"""Distillation: what `learned` has learned, as rules for `thresholds`."""
