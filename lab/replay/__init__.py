"""Replays a trace on simulated replicas, policy beside policy."""
