"""Traces: recorded requests, in this gateway's format and in published ones.

`read_trace` yields `TraceRecord`s from any of them, in memory that does not grow with the file.
"""

from gateway.recorder.schema import VERSION, Hashing
from lab.trace.decode import decode, encode, estimate_tokens
from lab.trace.lines import BrokenLine, BrokenLines, TraceError, refuse
from lab.trace.order import in_arrival_order
from lab.trace.read import FORMATS, detect_format, read_trace, trace_files
from lab.trace.record import BLOCK_TOKENS, Speculation, Text, TraceCandidate, TraceRecord
from lab.trace.write import WRITTEN_FORMATS, write_trace

__all__ = [
    "BLOCK_TOKENS",
    "FORMATS",
    "VERSION",
    "WRITTEN_FORMATS",
    "BrokenLine",
    "BrokenLines",
    "Hashing",
    "Speculation",
    "Text",
    "TraceCandidate",
    "TraceError",
    "TraceRecord",
    "decode",
    "detect_format",
    "encode",
    "estimate_tokens",
    "in_arrival_order",
    "read_trace",
    "refuse",
    "trace_files",
    "write_trace",
]
