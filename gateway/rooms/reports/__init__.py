"""What is reported of single requests when they have ended: a line in the access log, and spans for OpenTelemetry."""
