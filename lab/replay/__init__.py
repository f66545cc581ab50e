"""Replay of a trace on simulated replicas, once per policy."""
