"""Benchmark of the cost of a hop through a gateway: CPU time, added latency and memory, compared with peers."""
