"""The headers `traceparent` and `tracestate`: W3C Trace Context, https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINES = re.compile(rb"^traceparent: ([^\r\n]*)\r\n", re.MULTILINE)
_BOTH = re.compile(rb"^trace(?:parent|state): [^\r\n]*\r\n", re.MULTILINE)
_VALUE = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    r"""A span, as its process names it to the next one.

    Examples
    --------
    >>> TraceParent(0xABC, 0x1, is_sampled=True).line
    b'traceparent: 00-00000000000000000000000000000abc-0000000000000001-01\r\n'
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def line(self) -> bytes:
        """The header line."""
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace_id, self.span_id, self.is_sampled)


def read_traceparent(lines: bytes) -> TraceParent | None:
    r"""Return the span that header lines name; None if they name none, several or an invalid one.

    Examples
    --------
    >>> read_traceparent(b"accept: */*\r\ntraceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\r\n").is_sampled
    True
    >>> read_traceparent(b"traceparent: 00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01\r\n") is None
    True
    """
    if b"traceparent: " not in lines:
        return None
    values = _LINES.findall(lines)
    match = _VALUE.fullmatch(values[0].strip()) if len(values) == 1 else None
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceParent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


def with_parent(lines: bytes, parent: TraceParent, *, keeps_state: bool) -> bytes:
    r"""Return header lines that name another span; with the `tracestate` that there is only if it belongs to its trace.

    Examples
    --------
    >>> with_parent(b"tracestate: a=1\r\naccept: */*\r\n", TraceParent(1, 2, is_sampled=False), keeps_state=False)[:20]
    b'accept: */*\r\ntracepa'
    """
    return (_LINES if keeps_state else _BOTH).sub(b"", lines) + parent.line
