"""Routing policies: which replica serves a request, and what they learn from outcomes.

A decision is a function of the request, the candidates and what the policy has learned; nothing here does network I/O.
"""
