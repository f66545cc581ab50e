"""Routing policies on recorded acceptance: what they are worth, and where they lose."""
