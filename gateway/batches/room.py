"""Batches as a room of the gateway, which runs them: of each key one at a time.

Of the gateways with one place, the one that holds the lease does so; when it ends, another goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from backends import background
from gateway.batches import api
from gateway.batches.bounds import settings_of
from gateway.batches.lines import problem
from gateway.batches.records import Marker
from gateway.batches.run import BatchRun
from gateway.batches.storage import Document, Lease, Storage
from gateway.batches.throttle import WAIT_S, Throttle
from gateway.rooms import Room

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gateway.config.settings import PoolSettings
    from gateway.service.assembly import Gateway

_POLL_S: Final = 2.0
_IDLE_S: Final = 0.5
_KEY_COMES_S: Final = 10.0
"""Seconds that the key of a new batch may be unknown here: gateways are reloaded one after another."""
_TIDY_S: Final = 3600.0
_LONGEST_PAUSE_S: Final = 300.0


class BatchesRoom(Room):
    """Keeps files and batches, and runs those that are open."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._settings = gateway.settings.batches
        self._throttles: dict[str, Throttle] = {}  # by model
        self._running: dict[Marker, tuple[BatchRun, asyncio.Task[bool]]] = {}
        self._again: dict[Marker, tuple[float, float]] = {}  # of those that failed: when next, and the pause before
        self._has_news = asyncio.Event()
        self._checking = asyncio.Lock()
        self._tidied_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return what is not installed, or not allowed."""
        batches, body_mib = settings.batches, settings.server.max_body_mib
        if batches is not None and find_spec("fsspec") is None:
            return "batches needs fsspec: pip install '.[batches]' in a checkout (deploy/README.md#install)"
        if batches is not None and batches.max_file_mib > body_mib:
            return f"batches.max_file_mib is {batches.max_file_mib:g}, but server.max_body_mib {body_mib:g}: raise that"
        return ""

    @staticmethod
    def client_paths(settings: PoolSettings) -> Mapping[str, int]:
        """Return the paths of files and batches."""
        return {} if settings.batches is None else api.most_bytes(settings.batches)

    def add_routes(self, app: FastAPI) -> None:
        """Add the paths of files and batches."""
        if self._settings is not None:
            aside = self.gateway.metrics.counter("gateway_batch_objects_set_aside")
            self._storage = Storage(self._settings.url, self._settings.max_total_mib * 2**20)
            self._storage.on_aside = lambda kind: aside.labels(kind).inc()
            self._lease = Lease(self._storage, "lease.json")
            api.add_batches(app, self.gateway, self._settings, self._storage, self._has_news.set)

    def start(self) -> None:
        """Start looking for batches to run, and at the requests of others, beside which they run."""
        if self._settings is not None:
            self._tasks = [background.keep_running("batches", work) for work in (self._run, self._watch)]

    async def stop(self) -> None:
        """End what runs, so that others can go on with it."""
        for task in self._tasks[:1]:
            task.cancel()
        for run, _ in self._running.values():
            run.end()
        await asyncio.gather(*self._tasks[:1], *(task for _, task in self._running.values()), return_exceptions=True)
        for task in self._tasks[1:]:
            task.cancel()
        if self._tasks:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._lease.release)

    def tick(self) -> None:
        """Update the series."""
        for throttle in self._throttles.values():
            throttle.show()

    async def _watch(self) -> None:
        while True:
            for model in self.gateway.models:
                self._throttle_of(model).look()
            await asyncio.sleep(WAIT_S if self._running else _IDLE_S)

    async def _run(self) -> None:
        while True:
            self._has_news.clear()
            if await asyncio.to_thread(self._lease.hold):
                await self._look()
            else:
                for run, _ in self._running.values():
                    run.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._has_news.wait()

    async def _look(self) -> None:
        """Begin and end what is to begin and to end."""
        if time.monotonic() - self._tidied_s > _TIDY_S:
            self._tidied_s = time.monotonic()
            background.start("batches", asyncio.to_thread(self._storage.remove_leftovers))
        names = await asyncio.to_thread(self._storage.names, "open")
        markers = dict[Marker, str]()
        for name in names:
            if (marker := Marker.read(name.removesuffix(".cancel"))) is None:
                self._storage.set_aside(f"open/{name}", "its name is not that of a batch")
            elif not name.endswith(".cancel"):
                markers[marker] = name
        self._running = {marker: each for marker, each in self._running.items() if not each[1].done()}
        self._again = {marker: each for marker, each in self._again.items() if marker in markers}
        for marker, name in markers.items():
            with background.guarded("batches", of=marker.batch_id):
                self._begin_or_end(marker, is_cancelled=f"{name}.cancel" in names)

    def _begin_or_end(self, marker: Marker, *, is_cancelled: bool) -> None:
        now_s, end = time.time(), "cancelled" if is_cancelled else ""
        key, problems = self.gateway.relay.access.keyring.with_id(marker.owner), list[Document]()
        if now_s > marker.created_s + api.WINDOW_S:
            end = "expired"
        elif key is None and now_s < marker.created_s + _KEY_COMES_S:
            return
        elif key is None:
            end, problems = "failed", [problem("invalid_api_key", "The key that this batch belongs to is gone.")]
        elif (settings := settings_of(self.gateway, key)) is not None and not settings.batches:
            end, problems = "failed", [problem("batches_not_allowed", f"Key {key.name!r} may not use batches.")]
        is_busy = any(each.owner == marker.owner for each in self._running)
        is_due = time.monotonic() >= self._again.get(marker, (0.0, 0.0))[0]
        if marker not in self._running and (end or not is_busy) and is_due:
            run = BatchRun(self.gateway, self._storage, marker, self._throttle_of, self._checking)
            self._running[marker] = run, background.start("batches", self._run_one(marker, run), of=marker.batch_id)
        if end and marker in self._running:
            self._running[marker][0].end(end, problems)

    async def _run_one(self, marker: Marker, run: BatchRun) -> bool:
        """Run a batch; if that fails, it is begun again, after pauses that grow."""
        assert self._settings is not None
        is_ended = False
        try:
            is_ended = await run.run(self._settings.max_lines)
        finally:
            if not is_ended:
                pause_s = min(_LONGEST_PAUSE_S, 2.0 * self._again.get(marker, (0.0, 0.5))[1])
                self._again[marker] = time.monotonic() + pause_s, pause_s
            self._has_news.set()
        return is_ended

    def _throttle_of(self, model: str) -> Throttle:
        assert self._settings is not None
        if model not in self._throttles:
            self._throttles[model] = Throttle(self.gateway, model, self._settings.max_in_flight)
        return self._throttles[model]
