"""A simulated replica's drafts, and how many of their tokens are accepted."""
