"""The relay's HTTP/1.1 client."""
