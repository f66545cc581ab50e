"""The simulator held against real vLLM on the CPU: see docs/vllm-cpu-calibration.md."""
