"""The trail of one request: what is reported of it when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import getrandbits

from backends.backend import Backend
from gateway.http.paths import endpoint_of
from gateway.relay.context import Inbound
from gateway.relay.observers import EndedExchange, Observer, Times
from gateway.telemetry.traceparent import TraceParent, with_parent
from policies.features.request import RequestFeatures
from policies.policy import Decision, Outcome


class Leg:
    """One attempt: what was sent to one backend."""

    __slots__ = ("began_s", "decision", "failure", "host", "method", "port", "span_id")

    def __init__(self, decision: Decision, began_s: float, span_id: int) -> None:
        self.decision = decision
        self.began_s = began_s  # when it was sent, by `time.perf_counter`
        self.span_id = span_id  # 0 if the request gets no spans
        # Why the request went to another backend then, as `gateway_retries_total` names it; else empty.
        self.failure = ""
        self.method = self.host = ""
        self.port = 0  # address of the backend; its path and 0 for a Unix socket


class Trail(Observer):
    """The trail of one request."""

    def __init__(
        self,
        report: Callable[[Trail, EndedExchange], None],
        request_id: bytes,
        method: str,
        path: str,
        parent: TraceParent | None,
        trace: TraceParent | None,
        inbound: Inbound | None = None,
        *,
        is_logged: bool = False,
    ) -> None:
        self._report = report  # called with the trail and the exchange when that has ended
        self._inbound = inbound  # the request; None for one that was refused before it was routed
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
        self.times = Times(0.0)
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
        """Begin a leg, and tell the backend its span."""
        trace, inbound = self.trace, self._inbound
        span_id = 0
        if trace is not None and inbound is not None and (trace.is_sampled or self.parent is None):
            span_id = getrandbits(64) or 1
            span = TraceParent(trace.trace_id, span_id, trace.is_sampled)
            inbound.lines = with_parent(inbound.request_headers.lines, span, keeps_state=self.parent is not None)
        self.legs.append(Leg(decision, time.perf_counter(), span_id))

    def on_retry(self, kind: str) -> None:
        """Record why the last backend failed."""
        self.legs[-1].failure = kind

    def on_end(self, ended: EndedExchange) -> None:
        """Keep what is reported, without the texts of the request, and report it."""
        self._inbound = None  # its body may be long, and the trail may wait
        self.client, self.model = ended.client.name, ended.routed.model.name
        self.status, self.label, self.times = ended.status, ended.label, ended.times
        self.retried_from, self.rescued_from = ended.retried_from, ended.rescued_from
        self.features, self.outcome = ended.routed.features, ended.outcome
        for leg in self.legs:
            upstream = ended.routed.model.upstreams.get(leg.decision.backend)
            if upstream is not None:  # else it was removed meanwhile
                address = upstream.client.address
                leg.method = upstream.backend.said.method.value
                leg.host, leg.port = address.path or address.host, 0 if address.path else address.port
        self._report(self, ended)
