"""The trail of one request: what is reported when it has ended.

The headers `traceparent` and `tracestate` place its span in the client's trace: W3C Trace Context,
https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import getrandbits

from backends.backend import Backend
from gateway.http.paths import endpoint_of
from gateway.relay.observers import EndedExchange, Traced
from policies.features.request import RequestFeatures
from policies.policy import Decision, Outcome

_LINES = re.compile(rb"^traceparent: ([^\r\n]*)\r\n", re.MULTILINE)
_BOTH = re.compile(rb"^trace(?:parent|state): [^\r\n]*\r\n", re.MULTILINE)
_VALUE = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    r"""A span, as one process names it to the next.

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
    r"""Return the span named in header lines; None if they name none, several or an invalid one.

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
    r"""Return header lines that name another span; they keep a `tracestate` only if it belongs to that trace.

    Examples
    --------
    >>> with_parent(b"tracestate: a=1\r\naccept: */*\r\n", TraceParent(1, 2, is_sampled=False), keeps_state=False)[:20]
    b'accept: */*\r\ntracepa'
    """
    return (_LINES if keeps_state else _BOTH).sub(b"", lines) + parent.line


class Leg:
    """One attempt: what was sent to one backend."""

    def __init__(self, decision: Decision, began_s: float, span_id: int) -> None:
        self.decision = decision
        self.began_s = began_s  # when it was sent, by `time.perf_counter`
        self.span_id = span_id  # 0 if the request gets no spans
        # Why the request then went to another backend, as `gateway_retries_total` names it; else empty.
        self.failure = ""
        self.method = self.host = ""
        self.port = 0  # address of the backend; its path and 0 for a Unix socket


class Trail(Traced):
    """The trail of one request."""

    def __init__(
        self,
        report: Callable[[Trail], None],
        request_id: bytes,
        method: str,
        path: str,
        lines: bytes,
        parent: TraceParent | None,
        trace: TraceParent | None,
        *,
        is_logged: bool = False,
    ) -> None:
        super().__init__(lines)
        self._received = lines  # header lines of the client
        self._report = report  # called with the trail when its exchange has ended
        self.request_id = request_id
        self.method = method
        self.path = path
        self.endpoint = endpoint_of(path, method)
        self.parent = parent  # the span of the client; None without one
        self.trace = trace  # the span of the request here; None if the gateway makes no spans
        self.is_logged = is_logged  # whether the request gets a line in the access log
        self.legs: list[Leg] = []
        self.client = self.model = ""
        self.status = 0
        self.label = self.error = self.retried_from = self.rescued_from = ""
        # Times by `time.perf_counter`, as in `EndedExchange`.
        self.arrived_s = self.first_s = self.ended_s = self.waited_s = 0.0
        self.features: RequestFeatures | None = None
        self.outcome: Outcome | None = None

    @property
    def trace_id(self) -> int:
        """Id of the trace that the request is part of; 0 without one."""
        span = self.trace or self.parent
        return 0 if span is None else span.trace_id

    @property
    def is_sampled(self) -> bool:
        """Whether the request gets spans."""
        return self.trace is not None and self.trace.is_sampled

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Begin a leg, and set its span in the header lines for the backend."""
        trace, span_id = self.trace, 0
        if trace is not None and (trace.is_sampled or self.parent is None):
            span_id = getrandbits(64) or 1
            span = TraceParent(trace.trace_id, span_id, trace.is_sampled)
            self.lines = with_parent(self._received, span, keeps_state=self.parent is not None)
        self.legs.append(Leg(decision, time.perf_counter(), span_id))

    def on_retry(self, kind: str) -> None:
        """Record why the last backend failed."""
        self.legs[-1].failure = kind

    def refuse(self, client: str, status: int, error: str, arrived_s: float) -> None:
        """Report a request that was refused before it was routed."""
        self.client, self.status, self.label, self.error = client, status, "refused", error
        self.arrived_s, self.ended_s = arrived_s, time.perf_counter()
        self._end()

    def on_end(self, ended: EndedExchange) -> None:
        """Copy what to report, without the texts of the request, and report it."""
        self.client, self.model = ended.client.name, ended.routed.model.name
        self.status, self.label = ended.status, ended.label
        self.arrived_s, self.first_s = ended.arrived_s, ended.first_s
        self.ended_s, self.waited_s = ended.ended_s, ended.waited_s
        self.retried_from, self.rescued_from = ended.retried_from, ended.rescued_from
        self.features, self.outcome = ended.routed.features, ended.outcome
        for leg in self.legs:
            upstream = ended.routed.model.upstreams.get(leg.decision.backend)
            if upstream is not None:  # else it was removed meanwhile
                address, leg.method = upstream.client.address, upstream.backend.declared.method.value
                leg.host, leg.port = address.path or address.host, 0 if address.path else address.port
        self._end()

    def _end(self) -> None:
        self.lines = self._received = b""  # may be long, and reports may wait
        self._report(self)
