"""Files that people write, and files of checkpoints."""
