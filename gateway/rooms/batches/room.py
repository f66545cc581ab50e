"""The room that runs batches, one at a time for each key.

Of the gateways that share a folder, the one that holds its lock runs them; when it exits, another takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from backends import background
from gateway.gateway import Room
from gateway.rooms.batches import api
from gateway.rooms.batches.lines import Document, problem
from gateway.rooms.batches.places import WAIT_S, ModelPlaces
from gateway.rooms.batches.records import BatchPlace, BatchRecord
from gateway.rooms.batches.run import BatchRun, settings_of
from gateway.rooms.batches.settings import BatchesSettings
from gateway.rooms.batches.storage import Storage

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway

_POLL_S, _IDLE_S, _END_S = 2.0, 0.5, 5.0
_KEY_COMES_S: Final = 600.0
"""Seconds for which the key of a new batch may be unknown here: gateways get a new pool file minutes apart."""


class BatchesRoom(Room):
    """Stores files and batches, and runs open batches."""

    order = 7
    work = ("batches",)
    restart_keys = ("batches",)

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        settings = BatchesSettings.of(gateway.settings)
        assert settings is not None
        self._settings = settings
        self._runs: dict[BatchPlace, BatchRun] = {}
        self._tasks: dict[BatchPlace, asyncio.Task[None]] = {}
        self._work: list[asyncio.Task[None]] = []
        self._has_news = asyncio.Event()
        self._checking = asyncio.Lock()
        self._aside = gateway.metrics.counter("gateway_batch_objects_set_aside")
        gateway.metrics.counter("gateway_batch_lines")  # which their users find by name
        gateway.metrics.gauge("gateway_batch_lines_in_flight")

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether the settings enable it."""
        return BatchesSettings.of(settings) is not None

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return how the settings conflict."""
        batches, body_mib = BatchesSettings.of(settings), settings.server.max_body_mib
        if batches is not None and batches.max_file_mib > body_mib:
            return f"batches.max_file_mib is {batches.max_file_mib:g}, but server.max_body_mib {body_mib:g}: raise that"
        return ""

    @staticmethod
    def client_paths(settings: PoolSettings) -> Mapping[str, int]:
        """Return the paths of files and batches."""
        batches = BatchesSettings.of(settings)
        return {} if batches is None else api.most_bytes(batches)

    def add_routes(self, app: FastAPI) -> None:
        """Add the paths of files and batches."""
        most_bytes = self._settings.max_total_mib * 2**20
        self._storage = Storage(self._settings.folder, most_bytes, lambda kind: self._aside.labels(kind).inc())
        self._places_of = cache(lambda model: ModelPlaces(self.gateway, model, self._settings.max_in_flight))
        api.add_batches(app, self.gateway, self._settings, self._storage, self._has_news.set)

    def start(self) -> None:
        """Start to run batches, and to watch other requests, to which they give way."""
        self._work = [background.keep_running("batches", work) for work in (self._run, self._watch)]

    async def stop(self) -> None:
        """End the runs, so that another gateway can take them over."""
        if not self._work:
            return
        for run in self._runs.values():
            run.end()
        self._work[0].cancel()
        await asyncio.wait([self._work[0], *self._tasks.values()], timeout=_END_S)
        for task in (*self._work, *self._tasks.values()):
            task.cancel()
        self._storage.release()

    async def _watch(self) -> None:
        while True:
            for model in self.gateway.models:
                self._places_of(model).look()
            await asyncio.sleep(WAIT_S if self._runs else _IDLE_S)

    async def _run(self) -> None:
        while True:
            self._has_news.clear()
            if await asyncio.to_thread(self._storage.hold):
                await self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._has_news.wait()

    async def _look(self) -> None:
        """Begin and end the batches that are due."""
        paths = dict.fromkeys(f"open/{name}" for name in await asyncio.to_thread(self._storage.names, "open"))
        for ended in [each for each, task in self._tasks.items() if task.done() and each.open not in paths]:
            del self._tasks[ended], self._runs[ended]
        for path in paths:
            with background.guarded("batches", of=path):
                if (place := BatchPlace.at(path)) is None:
                    self._storage.set_aside(path, "its name is not that of a batch")
                elif place.open not in paths:
                    # A listing may miss a file that is being replaced.
                    if await asyncio.to_thread(self._storage.read, place.open, BatchRecord) is None:
                        await asyncio.to_thread(self._storage.remove, path)  # left over from a batch that has ended
                elif path == place.open:
                    await self._begin_or_end(place, is_cancelled=f"{path}.cancel" in paths)

    async def _begin_or_end(self, place: BatchPlace, *, is_cancelled: bool) -> None:
        now_s, end = time.time(), "cancelled" if is_cancelled else ""
        key, problems = self.gateway.relay.access.keyring.with_id(place.owner), list[Document]()
        settings = None if key is None else settings_of(self.gateway, key)
        if now_s > place.created_s + api.WINDOW_S:
            end = "expired"
        elif key is None and now_s < place.created_s + _KEY_COMES_S:
            return
        elif key is None:
            end, problems = "failed", [problem("invalid_api_key", "The key that this batch belongs to is gone.")]
        elif settings is not None and not settings.batches:
            end, problems = "failed", [problem("batches_not_allowed", f"Key {key.name!r} may not use batches.")]
        is_busy = any(each.owner == place.owner and not task.done() for each, task in self._tasks.items())
        if place not in self._tasks and (end or not is_busy):
            self._tasks[place] = background.keep_running("batches", partial(self._run_one, place), of=place.id)
            await asyncio.sleep(0)  # until it has begun
        run = self._runs.get(place)
        if end and run is not None:
            run.end(end, problems)
        elif run is not None:
            await run.save()

    async def _run_one(self, place: BatchPlace) -> None:
        """Run a batch; if that fails, it is restarted after growing pauses."""
        run = self._runs[place] = BatchRun(self.gateway, self._storage, place, self._places_of)
        try:
            await run.run(self._checking, self._settings.max_lines)
        finally:
            run.end()  # if it failed, the next run sends what is in flight again
            self._has_news.set()
