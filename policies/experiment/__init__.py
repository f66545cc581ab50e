"""Experiments: compare ways of serving on live traffic, with intervals that hold however often one looks."""
