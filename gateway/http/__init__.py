"""Headers, errors, server-sent events and usage, as the APIs define them."""
