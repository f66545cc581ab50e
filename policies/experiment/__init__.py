"""Experiments: ways of serving compared on live traffic, with intervals that hold however often they are looked at."""
