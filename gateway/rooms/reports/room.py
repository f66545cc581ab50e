"""Reports as a room of the gateway."""

from __future__ import annotations

import asyncio
from random import getrandbits, random
from typing import TYPE_CHECKING

from gateway.config.settings import TelemetrySettings
from gateway.dialects.errors import GatewayError
from gateway.gateway import Room
from gateway.relay.roles import Refused
from gateway.rooms.reports.access_log import AccessLog
from gateway.rooms.reports.outlet import Outlet
from gateway.rooms.reports.trail import TraceParent, Trail, read_traceparent
from gateway.routing.access import RequestHeaders

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway

_SPANS_DELAY_S = 1.0
_LOG_DELAY_S = 0.1
_LOG_LINES = 4096


class Reporter:
    """Reports the requests of one gateway process: `gateway.relay.roles.Reporting`."""

    def __init__(self, settings: TelemetrySettings) -> None:
        otlp = settings.otlp
        self._sample_ratio = 0.0 if otlp is None else otlp.sample_ratio
        self._log_share = settings.access_log
        self._log = Outlet(AccessLog(), _LOG_LINES, _LOG_DELAY_S) if settings.access_log else None
        self._spans: Outlet | None = None
        if otlp is not None:
            from gateway.rooms.reports.spans import Spans  # an extra

            self._spans = Outlet(Spans(otlp), otlp.queue, _SPANS_DELAY_S)
        self.outlets = [outlet for outlet in (self._spans, self._log) if outlet is not None]

    def follow(self, request: RequestHeaders, request_id: bytes) -> Trail | None:
        """Return the trail of a request, if anything will be reported of it."""
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
        reporter = self.reporter = Reporter(gateway.settings.telemetry)
        self.outlets = reporter.outlets

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether the settings ask for a report."""
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
