"""Making a pool file of another router's configuration: `gateway import`."""
