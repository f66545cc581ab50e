"""Heads of requests and answers: their paths, their headers, and which web pages may read them."""
