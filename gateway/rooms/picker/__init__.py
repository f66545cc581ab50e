"""The policies as an endpoint picker: a proxy such as Envoy asks where each request goes, and sends it there itself."""
