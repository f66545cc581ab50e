"""Fleets that follow days of traffic."""
