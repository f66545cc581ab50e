"""Trouble: kinds of requests that fail, stall or get unusable answers on some backends."""
