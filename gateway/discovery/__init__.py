"""Discovery of replicas: from DNS, and from services and inference pools of Kubernetes."""
