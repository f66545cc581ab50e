"""What simulated replicas write: tasks, text and tokens."""
