"""The endpoints below `/admin`."""
