"""What the gateways of a pool, and the workers of each, tell each other some 20 times a second."""
