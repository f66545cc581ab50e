"""Traces: recorded requests, in this gateway's format and in published ones.

`read_trace` yields `TraceRecord`s from any of them, in memory that does not grow with the file.
"""

from gateway.recorder.schema import Hashing
from lab.trace.decode import decode, encode
from lab.trace.lines import BrokenLine, BrokenLines, TraceError
from lab.trace.order import in_arrival_order
from lab.trace.read import FORMATS, read_trace, trace_files
from lab.trace.record import Speculation, Text, TraceCandidate, TraceRecord
from lab.trace.write import WRITTEN_FORMATS, write_trace

__all__ = [
    "FORMATS",
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
    "encode",
    "in_arrival_order",
    "read_trace",
    "trace_files",
    "write_trace",
]
