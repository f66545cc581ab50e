"""Files that people write, and those of checkpoints."""
