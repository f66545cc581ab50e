"""Listening sockets, their certificates, and the service manager."""
