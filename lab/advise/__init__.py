"""Advice from a recorded trace."""
