"""Features of a request, computed before it is routed."""
