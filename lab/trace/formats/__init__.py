"""Readers of published formats, one module per family; `lab.trace.read` recognizes them."""
