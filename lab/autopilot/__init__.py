"""Changing what the replicas of a running pool run, as the traffic changes."""
