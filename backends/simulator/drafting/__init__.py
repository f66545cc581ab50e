"""Drafts of a simulated replica, and how many of their tokens are accepted."""
