"""Search for the best mix of replicas for a trace."""
