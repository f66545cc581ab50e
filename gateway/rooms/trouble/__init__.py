"""Trouble: whether answers fail, stall or cannot be used, which the policies price or avoid."""
