"""Trouble: kinds of requests that fail, stall or get useless answers on some of the backends."""
