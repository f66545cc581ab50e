"""Advice to the operator: what to change in a pool, with the expected gain and the evidence."""
