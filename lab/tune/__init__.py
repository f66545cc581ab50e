"""Searches for the numbers in a pool's rules."""
