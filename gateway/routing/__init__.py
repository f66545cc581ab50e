"""Routing: from the head and body of a request to the backend that serves it."""
