"""What simulated replicas answer: tasks, text and tokens."""
