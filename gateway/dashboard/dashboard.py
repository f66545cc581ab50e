"""The dashboard of a gateway process: what it measures all the time, and what it makes while a page is open."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import orjson

from backends import background
from backends.backend import Backend
from gateway import __version__
from gateway.dashboard.beliefs import Beliefs
from gateway.dashboard.decisions import SampledDecisions
from gateway.dashboard.document import FORMAT, ModelView, Process, Snapshot
from gateway.dashboard.history import Past
from gateway.dashboard.pages import Pages
from gateway.dashboard.recent import POINT_S, RATE_WINDOW_S, WINDOW_S, Recent
from gateway.dashboard.totals import Series, shared_by_workers, totals_of
from gateway.dashboard.views import backend_view, model_view, point_of
from gateway.dialects.errors import GatewayError
from gateway.relay.context import RelayContext
from gateway.service.assembly import Gateway

log = logging.getLogger(__name__)

SNAPSHOT_S = 1.0
_ADVICE_S = 60.0


class Dashboard:
    """The live data of a gateway process.

    Every few seconds it reads counters, so that a page that is opened has a past. The rest is made once a second for
    all open pages together, and not at all without one.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._past = Past()
        self._recent: dict[tuple[str, str], tuple[Backend, Recent]] = {}
        self._points_at_s = 0.0
        self._history = -1.0, b""  # as of that point
        self._started_s = time.time()
        self._shared = shared_by_workers()
        self._access = gateway.relay.access
        self._decisions: dict[str, SampledDecisions] = {}
        self._beliefs: dict[str, Beliefs] = {}
        self._advice: list[Any] | None = None
        self._advised_s = -math.inf
        self._followed: RelayContext | None = None
        self._reading: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._believing: asyncio.Task[None] | None = None
        self.pages = Pages(self._open)  # the open streams

    def start(self) -> None:
        """Start reading counters."""
        self._reading = background.keep_running("dashboard", self._read)
        self._gateway.on_change.append(self._follow)
        self._gateway.on_drain.append(self.pages.close)

    async def stop(self) -> None:
        """Stop."""
        self._gateway.on_change.remove(self._follow)
        self._gateway.on_drain.remove(self.pages.close)
        self.pages.close()
        tasks = [task for task in (self._reading, self._publishing, self._believing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        """Check that there is a dashboard."""
        if not self._gateway.settings.dashboard.enabled:
            raise GatewayError(404, "The dashboard is off: set dashboard.enabled in the pool file.", code="not_found")

    def may(self, headers: Mapping[bytes, bytes], *, write: bool) -> bool:
        """Return whether the key of a request may read, or also change something."""
        try:
            self._gateway.relay.access.keyring.check_admin(headers, writes=write)
        except GatewayError:
            return False
        return True

    def first(self) -> bytes:
        """Return the events that a stream begins with."""
        if self._history[0] != self._points_at_s:
            document = orjson.dumps(self._past.document(), option=orjson.OPT_SERIALIZE_NUMPY)
            self._history = self._points_at_s, _event("history", document)
        return self._history[1] + _event("snapshot", self.snapshot())

    def snapshot(self) -> bytes:
        """Return a snapshot, as JSON."""
        gateway = self._gateway
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
        return orjson.dumps(Snapshot(FORMAT, time.time(), self._points_at_s, process, models, self._advice))

    def _model(self, name: str) -> ModelView:
        gateway, decisions, belief = self._gateway, self._decisions_of(name), self._beliefs.get(name)
        measured = [(backend, self._recent_of(backend).measured) for backend in gateway.pool.of(name)]
        total = sum(each.requests_per_s for _, each in measured)
        backends = [
            backend_view(gateway, backend, each, total, decisions.accuracy(backend.name)) for backend, each in measured
        ]
        return model_view(gateway, name, backends, None if belief is None else belief.json, decisions.document())

    def _decisions_of(self, name: str) -> SampledDecisions:
        if name not in self._decisions:
            self._decisions[name] = SampledDecisions(lambda: self._gateway.recorder is not None)
        return self._decisions[name]

    # While a page is open

    def _open(self) -> None:
        """Publish snapshots from now on."""
        if self._publishing is None or self._publishing.done():
            self._publishing = background.start("dashboard", self._publish())

    async def _publish(self) -> None:
        try:
            while self.pages.open:
                self._sample()
                if self._believing is None or self._believing.done():
                    self._believing = background.start("dashboard", self._believe())
                await asyncio.sleep(SNAPSHOT_S)
                if self.pages.open:
                    self.pages.publish(_event("snapshot", self.snapshot()))
        except Exception:
            log.exception("the dashboard cannot be shown")
            self.pages.end()  # the pages open other streams
        finally:
            self._unsample()

    def _sample(self) -> None:
        """Sample the decisions of the present relay."""
        relay, models = self._gateway.relay, self._gateway.models
        if self._followed is not relay:
            self._unsample()
            for name, followers in relay.followers.items():
                followers.append(self._decisions_of(name))
            self._followed = relay
        for gone in self._decisions.keys() - models.keys():
            del self._decisions[gone]

    def _unsample(self) -> None:
        if self._followed is not None:
            for name, followers in self._followed.followers.items():
                if (sampled := self._decisions.get(name)) in followers:
                    followers.remove(sampled)
            self._followed = None

    async def _believe(self) -> None:
        """Update beliefs and advice that may be out of date; takes a while."""
        gateway = self._gateway
        self._beliefs = {name: self._beliefs.get(name) or Beliefs() for name in gateway.models}
        try:
            for (name, model), beliefs in zip(gateway.models.items(), self._beliefs.values(), strict=True):
                await beliefs.update(model.policy, gateway.pool.of(name))
            if gateway.advise is not None and time.monotonic() - self._advised_s >= _ADVICE_S:
                self._advised_s = time.monotonic()
                advice = await gateway.advise()
                self._advice = [finding for each in advice.values() for finding in each["findings"]]
        except Exception:
            log.exception("the dashboard cannot show what policies believe")

    # All the time

    def _follow(self) -> None:
        """Follow a change of the settings: streams whose keys may have changed are opened again by their clients."""
        access, self._access = self._access, self._gateway.relay.access
        if access is not self._access:
            self.pages.end()

    async def _read(self) -> None:
        while True:
            if self._gateway.settings.dashboard.enabled:
                try:
                    shared = None if self._shared is None else await asyncio.to_thread(self._shared.read)
                    self._add_point(shared)
                except Exception:
                    log.exception("the dashboard cannot read the counters")
            await asyncio.sleep(POINT_S)

    def _add_point(self, shared: Mapping[Series, float] | None) -> None:
        gateway = self._gateway
        points: dict[tuple[str, str], list[float | None]] = {}
        recent = {(backend.model, backend.name): (backend, self._recent_of(backend)) for backend in gateway.pool}
        self._recent = recent  # without those that are gone
        for key, (backend, readings) in recent.items():
            bound = gateway.upstreams[backend.model][backend.name].metrics
            readings.add(totals_of(bound, gateway.pool.engine(backend), shared))
            points[key] = point_of(gateway, backend, readings.measured)
        for name, decisions in self._decisions.items():
            decisions.keep([backend.name for backend in gateway.pool.of(name)])
        self._points_at_s = time.time()
        self._past.add(self._points_at_s, points)

    def _recent_of(self, backend: Backend) -> Recent:
        """Return the readings of a backend; another one of the same name begins anew."""
        known = self._recent.get((backend.model, backend.name))
        if known is not None and known[0] is backend:
            return known[1]
        bound = self._gateway.upstreams[backend.model][backend.name].metrics
        return Recent(bound.ttft.bounds, bound.tpot.bounds)


def _event(name: str, document: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), document)
