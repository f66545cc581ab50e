"""Comparison of the simulator with a real vLLM on the CPU: see docs/simulator.md."""
