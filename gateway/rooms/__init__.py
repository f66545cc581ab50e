"""The rooms of a gateway, in one folder each, which can be deleted. See `gateway.gateway.Room`."""
