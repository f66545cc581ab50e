"""Where the gateway listens, what it shows there, and what it tells who started it."""
