"""Parsing of options that several commands share."""
