"""The room for reports: selects the requests to report, and runs the threads that do so."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from random import getrandbits, random
from typing import TYPE_CHECKING

from backends.background import Seldom
from gateway.config.settings import TelemetrySettings
from gateway.dialects.errors import GatewayError
from gateway.gateway import Room
from gateway.relay.roles import Refused
from gateway.rooms.reports.access_log import AccessLog
from gateway.rooms.reports.trail import TraceParent, Trail, read_traceparent
from gateway.routing.access import RequestHeaders
from gateway.telemetry.log_format import place_of
from gateway.telemetry.registry import Registry

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway
    from gateway.rooms.reports.spans import Spans

log = logging.getLogger(__name__)

_BATCH = 64
_PAUSE_S = 0.0005
_STOP_S = 3.0


_SPANS_DELAY_S = 1.0
_LOG_DELAY_S = 0.1
_LOG_LINES = 4096


class Outlet:
    """Passes ended requests to the access log or to spans, in a thread of its own."""

    def __init__(self, sink: AccessLog | Spans, max_trails: int, delay_s: float) -> None:
        self._sink = sink
        self._max_trails = max_trails  # most trails that wait; further ones are dropped
        self._delay_s = delay_s  # seconds after which an incomplete batch is passed on
        self._queue: deque[Trail] = deque()
        self._awake = threading.Event()
        self._stopping = self._gives_up = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry {sink.signal}", daemon=True)
        # Since the start; `dropped` is counted by the event loop, the others by the thread.
        self._passed = {"sent": 0, "dropped": 0, "failed": 0}
        self._counted = self._passed.copy()
        self._logged = Seldom()

    def put(self, trail: Trail) -> None:
        """Append a trail, or drop it if too many wait."""
        waiting = len(self._queue)
        if waiting >= self._max_trails:
            self._passed["dropped"] += 1
            return
        self._queue.append(trail)
        if waiting == _BATCH:
            self._awake.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Pass on the rest and end the thread; drop what the sink does not accept within seconds."""
        self._stopping = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._gives_up = True
        self._sink.close()
        self._passed["dropped"] += len(self._queue)

    def count(self, registry: Registry) -> None:
        """Add the changes since the last call to the series; runs on the event loop."""
        requests = registry.counter("gateway_telemetry_requests")
        for result, passed in self._passed.items():
            requests.labels(self._sink.signal, result).inc(passed - self._counted[result])
            self._counted[result] = passed

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._awake.wait(self._delay_s)
            self._awake.clear()
            is_last = self._stopping  # pass on what arrived until then
            while self._queue and not self._gives_up:
                self._pass_on([self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))])
                time.sleep(_PAUSE_S)  # releases the GIL, for which the event loop would otherwise wait 5 ms

    def _pass_on(self, trails: list[Trail]) -> None:
        try:
            problem = self._sink.write(trails)
        except Exception as error:  # noqa: BLE001 -- a defect in one batch must not end the thread
            problem = place_of(error)
        self._passed["failed" if problem else "sent"] += len(trails)
        if problem and self._logged.may_say():
            log.warning(
                "%s are lost: %s (logged once a minute; gateway_telemetry_requests_total counts the requests)",
                self._sink.signal,
                problem,
            )


class Reporter:
    """Reports the requests of one gateway process: `gateway.relay.roles.Reporting`."""

    def __init__(self, settings: TelemetrySettings, scheme: str) -> None:
        otlp = settings.otlp
        self._sample_ratio = 0.0 if otlp is None else otlp.sample_ratio
        self._log_share = settings.access_log
        self._log = Outlet(AccessLog(), _LOG_LINES, _LOG_DELAY_S) if settings.access_log else None
        self._spans: Outlet | None = None
        if otlp is not None:
            from gateway.rooms.reports.spans import Spans  # an extra

            self._spans = Outlet(Spans(otlp, scheme), otlp.queue, _SPANS_DELAY_S)
        self.outlets = [outlet for outlet in (self._spans, self._log) if outlet is not None]

    def follow(self, request: RequestHeaders, request_id: bytes) -> Trail | None:
        """Return the trail of a request, if it will be reported."""
        return self._trail(request_id, request.method, request.path, request.lines)

    def refuse(self, refused: Refused, error: GatewayError) -> None:
        """Report a request that was refused before it was routed."""
        trail = self._trail(refused.request_id, refused.method, refused.path, refused.lines)
        if trail is None:
            return
        trail.refuse(refused.client, error.status, error.code or str(error.status), refused.arrived_s)

    def _trail(self, request_id: bytes, method: str, path: str, lines: bytes) -> Trail | None:
        share = self._log_share
        is_logged = share > 0.0 and (share >= 1.0 or random() < share)
        if self._spans is None and not is_logged:
            return None
        parent = read_traceparent(lines)
        trace = None
        if self._spans is not None:
            is_sampled = random() < self._sample_ratio if parent is None else parent.is_sampled
            trace_id = (getrandbits(128) or 1) if parent is None else parent.trace_id
            trace = TraceParent(trace_id, getrandbits(64) or 1, is_sampled)
        return Trail(self._put, request_id, method, path, lines, parent, trace, is_logged=is_logged)

    def _put(self, trail: Trail) -> None:
        if self._spans is not None and trail.is_sampled:
            self._spans.put(trail)
        if self._log is not None and trail.is_logged:
            self._log.put(trail)


class ReportsRoom(Room):
    """Has a reporter follow all requests."""

    order = 5
    restart_keys = ("telemetry.otlp", "telemetry.access_log")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        reporter = self.reporter = Reporter(gateway.settings.telemetry, gateway.settings.server.scheme)
        self.outlets = reporter.outlets

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether the settings enable any report."""
        return settings.telemetry.otlp is not None or settings.telemetry.access_log > 0.0

    def start(self) -> None:
        """Start the threads."""
        for outlet in self.outlets:
            outlet.start()

    async def stop(self) -> None:
        """Pass on the rest, and end the threads."""
        for outlet in self.outlets:
            await asyncio.to_thread(outlet.stop)
        self.tick()

    def tick(self) -> None:
        """Update the series."""
        for outlet in self.outlets:
            outlet.count(self.gateway.metrics)
