"""Traces: recorded requests, in this gateway's format and in published ones.

`read_trace` yields `TraceRecord`s from any format, in memory that does not grow with the file.
"""
