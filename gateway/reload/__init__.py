"""Reload of the pool file while requests are served."""
