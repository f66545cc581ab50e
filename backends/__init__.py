"""The bottom layer: engine replicas and all that is known about them.

Imports neither `policies` nor `gateway`.
"""
