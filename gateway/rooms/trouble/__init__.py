"""Trouble: answers that fail, stall or are unusable, which policies price in or avoid."""
