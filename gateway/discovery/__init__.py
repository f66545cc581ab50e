"""Discovery of replicas: from DNS, and from the EndpointSlices of Kubernetes."""
