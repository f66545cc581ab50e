"""The server that clients speak to: requests and their heads, paths, and which web pages may read answers."""
