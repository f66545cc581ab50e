"""Reloads the pool file while requests are served."""
