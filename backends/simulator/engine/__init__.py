"""Continuous batching, in real time for one replica and in virtual time for fleets."""
