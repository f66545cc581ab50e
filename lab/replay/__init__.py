"""Replay of a trace on simulated replicas, once for each policy."""
