"""Replay of a trace against running endpoints."""
