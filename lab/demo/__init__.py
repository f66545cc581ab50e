"""A gateway with simulated replicas under a load that changes: `gateway demo`."""
