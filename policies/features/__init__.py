"""What the gateway knows of a request before it is sent."""
