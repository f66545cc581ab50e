"""A gateway with simulated replicas under a load that changes: `scripts/demo`."""
