"""Measured step times and acceptance, per target model, machine and method."""
