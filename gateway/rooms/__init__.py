"""The rooms of a gateway: what joins it, one folder each, which can be deleted. See `gateway.gateway.Room`."""
