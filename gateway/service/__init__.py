"""The running service: application, administration, workers, startup and shutdown."""
