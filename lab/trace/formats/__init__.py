"""Readers of published formats, a module for each family; `lab.trace.read` recognises them."""
