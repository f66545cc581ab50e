"""Advice to the operator: what to change in a pool, what it would gain, and on what evidence."""
