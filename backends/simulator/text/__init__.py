"""The answers of simulated replicas: tasks, text and tokens."""
