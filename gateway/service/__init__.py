"""The running service: application, administration, workers, start and stop."""
