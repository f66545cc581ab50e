"""Comparison of the simulator with published and recorded figures: `python -m benchmarks.calibration FACTS DATA`."""
