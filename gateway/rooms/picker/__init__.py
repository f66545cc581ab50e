"""The policies as an endpoint picker: a proxy such as Envoy asks where each request should go, and sends it there."""
