"""One request to one replica and back: the hot path."""
