"""What takes clients' requests in, on the HTTP server of `backends.http.server`."""
