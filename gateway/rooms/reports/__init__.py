"""Reports of ended requests: a line in the access log, and spans for OpenTelemetry."""
