"""A trace sent to a running endpoint."""
