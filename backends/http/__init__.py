"""The HTTP/1.1 client through which requests reach replicas."""
