"""The dashboard of a gateway process: what it measures all the time, and what it makes while a page is open."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping

import orjson

from backends.backend import Backend
from gateway import __version__
from gateway.dashboard.document import FORMAT, ModelView, Process, Snapshot
from gateway.dashboard.history import Past
from gateway.dashboard.pages import Pages
from gateway.dashboard.recent import POINT_S, RATE_WINDOW_S, WINDOW_S, Recent
from gateway.dashboard.totals import totals_of
from gateway.dashboard.views import backend_view, model_view, point_of
from gateway.http.errors import GatewayError
from gateway.routing.model import Upstream
from gateway.service.assembly import Gateway

log = logging.getLogger(__name__)

SNAPSHOT_S = 1.0


class Dashboard:
    """The live data of a gateway process.

    Every few seconds it reads counters, so that a page that is opened has a past. The rest is made once a second for
    all open pages together, and not at all without one.

    Attributes
    ----------
    pages
        The open streams.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._past = Past()
        self._recent: dict[tuple[str, str], tuple[Upstream, Recent]] = {}
        self._points_at_s = 0.0
        self._started_s = time.time()
        self._access = gateway.relay.access
        self._reading: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self.pages = Pages(self._open)

    def start(self) -> None:
        """Start reading counters."""
        self._reading = asyncio.create_task(self._read())
        self._gateway.on_change.append(self._follow)
        self._gateway.on_drain.append(self.pages.close)

    async def stop(self) -> None:
        """Stop."""
        self._gateway.on_change.remove(self._follow)
        self._gateway.on_drain.remove(self.pages.close)
        self.pages.close()
        tasks = [task for task in (self._reading, self._publishing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        """Check that there is a dashboard.

        Raises
        ------
        GatewayError
            404 if it is turned off.
        """
        if not self._gateway.settings.dashboard.enabled:
            raise GatewayError(404, "The dashboard is off: set dashboard.enabled in the pool file.", code="not_found")

    def may_write(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a key may change something."""
        try:
            self._gateway.relay.access.keyring.check_admin(headers, writes=True)
        except GatewayError:
            return False
        return True

    def first(self) -> bytes:
        """Return the events that a stream begins with."""
        return _event("history", orjson.dumps(self._past.document())) + _event("snapshot", self.snapshot())

    def snapshot(self) -> bytes:
        """Return a snapshot, as JSON."""
        gateway = self._gateway
        if not self._points_at_s:
            self._add_point()
        process = Process(
            __version__,
            self._started_s,
            os.getpid(),
            gateway.settings.server.workers,
            self.pages.open,
            WINDOW_S,
            RATE_WINDOW_S,
        )
        models = [self._model(name) for name in gateway.models]
        return orjson.dumps(Snapshot(FORMAT, time.time(), self._points_at_s, process, models))

    def _model(self, name: str) -> ModelView:
        gateway = self._gateway
        measured = {backend.name: self._recent_of(backend).measured for backend in gateway.pool.of(name)}
        total = sum(each.requests_per_s for each in measured.values())
        backends = [backend_view(gateway, backend, measured[backend.name], total) for backend in gateway.pool.of(name)]
        return model_view(gateway, name, backends)

    def _follow(self) -> None:
        """Follow a change of the settings: streams whose keys may have changed are opened again by their clients."""
        access, self._access = self._access, self._gateway.relay.access
        if access is not self._access:
            self.pages.end()

    def _open(self) -> None:
        """Publish snapshots from now on."""
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        while self.pages.open:
            await asyncio.sleep(SNAPSHOT_S)
            if self.pages.open:
                try:
                    self.pages.publish(_event("snapshot", self.snapshot()))
                except Exception:
                    log.exception("the dashboard cannot be shown")

    async def _read(self) -> None:
        while True:
            if self._gateway.settings.dashboard.enabled:
                self._add_point()
            await asyncio.sleep(POINT_S)

    def _add_point(self) -> None:
        gateway = self._gateway
        points: dict[tuple[str, str], list[float | None]] = {}
        for backend in gateway.pool:
            upstream = gateway.upstreams[backend.model][backend.name]
            self._recent_of(backend).add(totals_of(upstream, gateway.pool.engine(backend)))
        self._recent = {key: each for key, each in self._recent.items() if each[0].backend in list(gateway.pool)}
        for backend in gateway.pool:
            measured = self._recent_of(backend).measured
            points[backend.model, backend.name] = point_of(gateway, backend, measured)
        self._points_at_s = time.time()
        self._past.add(self._points_at_s, points)

    def _recent_of(self, backend: Backend) -> Recent:
        """Return the readings of a backend; another one of the same name begins anew."""
        key = (backend.model, backend.name)
        upstream = self._gateway.upstreams[backend.model][backend.name]
        known = self._recent.get(key)
        if known is None or known[0].backend is not backend:
            bound = upstream.metrics
            known = self._recent[key] = upstream, Recent(bound.ttft.bounds, bound.tpot.bounds)
        return known[1]


def _event(name: str, document: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), document)
