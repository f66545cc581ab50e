"""The simulator held against what real engines were measured to do: `python -m benchmarks.calibration FACTS DATA`."""
