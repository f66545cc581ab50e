"""Reports that the gateways of a pool, and the workers of each, exchange some 20 times a second."""
