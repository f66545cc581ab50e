"""The bottom layer: engine replicas and everything known about them.

Imports neither `policies` nor `gateway`.
"""
