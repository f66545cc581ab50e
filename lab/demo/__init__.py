"""A gateway with simulated replicas under a changing load: `gateway demo`."""
