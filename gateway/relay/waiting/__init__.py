"""Requests that wait: in the queue of their model, by the shares of its clients, or for its first replica."""
