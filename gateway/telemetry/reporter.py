"""The reporter: decides which requests are reported, and to what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import getrandbits, random

from gateway.config.settings import TelemetrySettings
from gateway.dialects.errors import GatewayError
from gateway.relay.context import Inbound, Refused
from gateway.relay.observers import EndedExchange, Times
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.outlet import Outlet
from gateway.telemetry.traceparent import TraceParent, read_traceparent
from gateway.telemetry.trail import Trail

_SPANS_DELAY_S = 1.0
_DELAY_S = 0.1
_LOG_LINES = 4096
_EXEMPLAR_CHARS = 128 - len("request_id")  # of the labels of one: OpenMetrics 1.0


class Reporter:
    """Reports the requests of one gateway process, by the settings; exists only if these ask for something."""

    def __init__(self, settings: TelemetrySettings) -> None:
        otlp = settings.otlp
        self._sample_ratio = 0.0 if otlp is None else otlp.sample_ratio
        self._traces = otlp is not None
        self._log_share = settings.access_log
        self._exemplars = settings.exemplars
        self._spans: Outlet | None = None
        self._metrics: Outlet | None = None
        self._log: Outlet | None = None
        if settings.access_log:
            from gateway.telemetry.access_log import AccessLog

            self._log = Outlet(AccessLog(), _LOG_LINES, _DELAY_S)
        if otlp is not None:
            from gateway.telemetry.otlp import GenAiMetrics, Spans, quiet_sdk, resource

            quiet_sdk()
            own = resource()
            self._spans = Outlet(Spans(otlp, own), otlp.queue, _SPANS_DELAY_S)
            if otlp.metrics:
                self._metrics = Outlet(GenAiMetrics(otlp, own), otlp.queue, _DELAY_S)
        self._outlets = [outlet for outlet in (self._spans, self._metrics, self._log) if outlet is not None]

    # On the request path

    def follow(self, inbound: Inbound, request_id: bytes) -> Sequence[Trail]:
        """Return the trail of a request, if anything will be reported of it."""
        trail = self._trail(request_id, inbound.request_headers.method, inbound.path, inbound.lines, inbound)
        return () if trail is None else (trail,)

    def refuse(self, refused: Refused, error: GatewayError) -> None:
        """Report a request that was refused before it was routed."""
        trail = self._trail(refused.request_id, refused.method, refused.path, refused.lines)
        if trail is None:
            return
        trail.client, trail.status, trail.label = refused.client, error.status, "refused"
        trail.error = error.code or str(error.status)
        trail.times = Times(refused.arrived_s, ended_s=time.perf_counter())
        self._put(trail)

    def _trail(
        self, request_id: bytes, method: str, path: str, lines: bytes, inbound: Inbound | None = None
    ) -> Trail | None:
        share = self._log_share
        is_logged = share > 0.0 and (share >= 1.0 or random() < share)
        if not (self._traces or self._exemplars or is_logged):
            return None
        parent = read_traceparent(lines)
        trace = None
        if self._traces:
            is_sampled = random() < self._sample_ratio if parent is None else parent.is_sampled
            trace_id = (getrandbits(128) or 1) if parent is None else parent.trace_id
            trace = TraceParent(trace_id, getrandbits(64) or 1, is_sampled)
        return Trail(self._end, request_id, method, path, parent, trace, inbound, is_logged=is_logged)

    def _end(self, trail: Trail, ended: EndedExchange) -> None:
        if self._exemplars:
            self._mark(trail, ended)
        self._put(trail)

    def _put(self, trail: Trail) -> None:
        if self._spans is not None and trail.is_sampled:
            self._spans.put(trail)
        if self._metrics is not None:
            self._metrics.put(trail)
        if self._log is not None and trail.is_logged:
            self._log.put(trail)

    def _mark(self, trail: Trail, ended: EndedExchange) -> None:
        """Make the request an exemplar of its latencies, as `gateway.relay.accounting` counts them."""
        times = ended.times
        if ended.outcome is None or ended.upstream is None or ended.rescued_from:
            return
        if trail.trace_id and (trail.trace is None or trail.is_sampled):
            labels = {"trace_id": f"{trail.trace_id:032x}"}
        else:
            labels = {"request_id": trail.request_id.decode("latin-1")}
            if len(labels["request_id"]) > _EXEMPLAR_CHARS:
                return
        now_s = time.time()
        ended.upstream.metrics.e2e.mark(times.ended_s - times.arrived_s, labels, now_s)
        if ended.outcome.ttft_s is not None:
            ended.upstream.metrics.ttft.mark(times.first_s - times.arrived_s, labels, now_s)

    # Control

    def start(self) -> None:
        """Start the threads."""
        for outlet in self._outlets:
            outlet.start()

    def stop(self) -> None:
        """Pass on the rest, and end the threads; called when no request is in flight."""
        for outlet in self._outlets:
            outlet.stop()

    def count(self, metrics: Metrics) -> None:
        """Add the changes since the last call to the metrics; runs on the event loop."""
        for outlet in self._outlets:
            outlet.count(metrics)


def reporter_for(settings: TelemetrySettings) -> Reporter | None:
    """Return the reporter; None if the settings ask for none."""
    if settings.otlp is None and not settings.exemplars and not settings.access_log:
        return None
    return Reporter(settings)
