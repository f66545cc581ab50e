"""Simulation of a trace on replicas in virtual time."""
