"""The dashboard of a gateway process: a page at `/dashboard`, and the live data that it fetches each second."""

from __future__ import annotations

import asyncio
import math
import mimetypes
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from backends import background
from backends.backend import Backend
from gateway import __version__
from gateway.dialects.errors import GatewayError
from gateway.gateway import Page, Room, join
from gateway.http.paths import ADMIN_DOCS
from gateway.relay.observers import Follower
from gateway.rooms.dashboard.decisions import SampledDecisions
from gateway.rooms.dashboard.recent import (
    POINT_S,
    RATE_WINDOW_S,
    WINDOW_S,
    Document,
    KeptObjectives,
    Past,
    Recent,
    Totals,
    loads_of,
    totals_of,
)
from gateway.rooms.dashboard.settings import DashboardSettings
from gateway.rooms.dashboard.views import backend_view, model_view, point_of
from policies.build import learned_of
from policies.learned.belief import belief_of
from policies.learned.policy import Learned
from policies.policy import Policy

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway

_HEADERS = {
    # Nothing from other hosts, and nothing inline.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated each time, and answered 304
}


_BELIEFS_PAUSE_S = 5.0
_BELIEFS_CPU_SHARE = 0.001
"""Largest share of a core for beliefs; longer updates run less often."""
FORMAT = 2
"""Version of the data; changes with the meaning of a field, not for new fields."""
SNAPSHOT_S = 1.0
WATCHED_S = 5.0
"""Seconds for which decisions are sampled after the last request for a snapshot."""


class PageFiles(StaticFiles):
    """The files of the folder `static`."""

    def __init__(self) -> None:
        mimetypes.init()  # reads files now, not in the first answer
        super().__init__(directory=Path(__file__).parent / "static")

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a file, or 304 if the client already has it."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response


class Beliefs:
    """The beliefs of a policy."""

    def __init__(self) -> None:
        self.json: bytes | None = None  # the latest, as JSON; None if the policy has none
        self._seen: object = None
        self._next_s = 0.0

    async def update(self, policy: Policy, backends: Sequence[Backend]) -> None:
        """Rewrite them if the policy has learned something, and the last update is long enough ago."""
        learned = learned_of(policy)
        if learned is None:
            self.json, self._seen = None, None
            return
        seen = learned, learned.statistics.observations, len(learned.known.replicas)
        if time.monotonic() < self._next_s or seen == self._seen:
            return
        self._seen = seen
        requests = [backend.in_flight + backend.load.others for backend in backends]
        batch = max(1.0, round(sum(requests) / len(requests), 1)) if requests else 1.0
        await asyncio.to_thread(self._write, learned, list(backends), batch)

    def _write(self, learned: Learned, backends: list[Backend], batch: float) -> None:
        began_s = time.thread_time()
        self.json = orjson.dumps(belief_of(learned, backends, batch))
        cpu_s = time.thread_time() - began_s
        self._next_s = time.monotonic() + max(_BELIEFS_PAUSE_S, cpu_s / _BELIEFS_CPU_SHARE)


class Dashboard(Room):
    """The live data of a gateway process.

    It reads counters every few seconds, so that a newly opened page has a history. It computes the rest at most once a
    second for all open pages together, and not at all without one.
    """

    order = 11
    work = ("dashboard",)

    page = Page("/dashboard", "Dashboard")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._started_s = time.time()
        self._past = Past()
        self._kept = KeptObjectives()
        self._loads: dict[str, float] = {}
        self._recent: dict[tuple[str, str], tuple[Backend, Recent]] = {}
        self._decisions: dict[str, SampledDecisions] = {}
        self._beliefs: dict[str, Beliefs] = {}
        self._next_read_s = -math.inf
        self._points_at_s = 0.0
        self._is_watched = False
        self._asked_s = -math.inf
        self._made_s = -math.inf
        self._snapshot = b""

    @staticmethod
    def shows_page(settings: PoolSettings) -> bool:
        """Return whether the settings enable it."""
        return _section(settings).enabled

    @staticmethod
    def public_paths(settings: PoolSettings) -> tuple[str, ...]:
        """Return the path of its data, if that is public."""
        return ("/admin/dashboard/",) if _section(settings).public else ()

    def add_routes(self, app: FastAPI) -> None:
        """Add the pages, which hold no data, and their data below `/admin/dashboard`."""
        files = PageFiles()
        app.mount(f"{self.page.path}/static", files)

        @app.get(self.page.path, include_in_schema=False)
        async def page(request: Request) -> Response:
            """Return the page."""
            return await files.get_response("index.html", request.scope)

        @app.get("/", include_in_schema=False)
        async def home() -> Response:
            """Redirect a browser to the page, even behind a proxy that serves the gateway below a path."""
            return RedirectResponse("dashboard")

        @app.get(ADMIN_DOCS, include_in_schema=False)
        async def docs(request: Request) -> Response:
            """Return the page that shows the OpenAPI document of `/admin`."""
            self._check()
            return await files.get_response("docs.html", request.scope)

        @app.get("/admin/dashboard/history", tags=["dashboard"])
        async def history() -> Response:
            """Return the last half hour of all backends, a point every few seconds."""
            self._check()
            return _json(orjson.dumps({"format": FORMAT} | self._past.document(), option=orjson.OPT_SERIALIZE_NUMPY))

        @app.get("/admin/dashboard/snapshot", tags=["dashboard"])
        async def snapshot() -> Response:
            """Return a snapshot; for some seconds after, decisions are sampled."""
            self._check()
            return _json(self._present())

    def follow(self) -> Mapping[str, Follower]:
        """Return what samples decisions while a page is open."""
        if not self._is_watched:
            return {}
        known = self._decisions
        explains = any(room.needs_scores for room in self.gateway.rooms)
        # If texts may be recorded, the page may name templates by them, but not to viewers without a key.
        names = any(room.keeps_texts for room in self.gateway.rooms) and not _section(self.gateway.settings).public
        self._decisions = {name: known.get(name) or SampledDecisions(explains=explains) for name in self.gateway.models}
        for sampled in self._decisions.values():
            sampled.templates = (sampled.templates or {}) if names else None
        return self._decisions

    def tick(self) -> None:
        """Read counters every few seconds, and detect that nobody watches any more."""
        now_s = time.monotonic()
        if self._is_watched and now_s - self._asked_s > WATCHED_S:
            self._watch(is_watched=False)
        is_reading = self.running is not None and not self.running.done()
        if _section(self.gateway.settings).enabled and now_s >= self._next_read_s and not is_reading:
            self._next_read_s = now_s + POINT_S
            self.running = background.start("dashboard", self._read())

    async def _read(self) -> None:
        samples = await asyncio.to_thread(lambda: list(self.gateway.metrics.samples()))
        self._kept.add(samples)
        self._loads = loads_of(samples)
        self._add_points(await asyncio.to_thread(totals_of, samples))
        if self._is_watched:
            models = self.gateway.models
            self._beliefs = {name: self._beliefs.get(name) or Beliefs() for name in models}
            for name, beliefs in self._beliefs.items():
                with background.guarded("dashboard", of=name):
                    await beliefs.update(models[name].policy, self.gateway.pool.of(name))

    def _add_points(self, totals: Mapping[tuple[str, str], Totals]) -> None:
        points = {}
        backends = {(backend.model, backend.name): backend for backend in self.gateway.pool}
        self._recent = {key: (backend, self._recent_of(backend)) for key, backend in backends.items()}
        for key, (backend, recent) in self._recent.items():
            counted = totals.get(key) or Totals()
            recent.add(counted)
            points[key] = point_of(self.gateway.pool.watch(backend), recent.measured)
        self._points_at_s = time.time()
        self._past.add(self._points_at_s, points)

    def _recent_of(self, backend: Backend) -> Recent:
        """Return the readings of a backend; a new one of the same name starts over."""
        known = self._recent.get((backend.model, backend.name))
        return known[1] if known is not None and known[0] is backend else Recent()

    def _check(self) -> None:
        if not _section(self.gateway.settings).enabled:
            raise GatewayError(404, "The dashboard is off: set dashboard.enabled in the pool file.", code="not_found")

    def _watch(self, *, is_watched: bool) -> None:
        self._is_watched = is_watched
        join(self.gateway)

    def _present(self) -> bytes:
        """Return a snapshot that is at most a second old."""
        self._asked_s = time.monotonic()
        if not self._is_watched:
            self._watch(is_watched=True)
        if self._asked_s - self._made_s >= SNAPSHOT_S:
            self._snapshot = orjson.dumps(self._document())
            self._made_s = self._asked_s
        return self._snapshot

    def _document(self) -> Document:
        process: dict[str, Any] = {
            "version": __version__,
            "started_s": self._started_s,
            "pid": os.getpid(),
            # With several, decisions, gains, slowdowns and queues are of the answering process; counters are of all.
            "workers": self.gateway.settings.server.workers,
            "window_s": WINDOW_S,  # of quantiles
            "rate_window_s": RATE_WINDOW_S,  # of rates, shares and acceptance
        }
        return {
            "format": FORMAT,
            "at_s": time.time(),
            "points_at_s": self._points_at_s,  # time of the newest points
            "process": process,
            "models": [self._model(name) for name in self.gateway.models],
        }

    def _model(self, name: str) -> Document:
        model, belief = self.gateway.models[name], self._beliefs.get(name)
        measured = [(backend, self._recent_of(backend).measured) for backend in self.gateway.pool.of(name)]
        total = sum(each.requests_per_s for _, each in measured)
        backends = [backend_view(model, self.gateway.pool.watch(backend), each, total) for backend, each in measured]
        document = model_view(
            self.gateway, name, backends, None if belief is None else belief.json, self._decisions.get(name)
        )
        # classes: requests with a latency objective in `window_s`; load: None if unknown
        return document | {"classes": self._kept.of(name), "load": self._loads.get(name)}


def _section(settings: PoolSettings) -> DashboardSettings:
    return DashboardSettings.of(settings) or DashboardSettings()


def _json(document: bytes) -> Response:
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
