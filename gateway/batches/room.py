"""Batches as a room of the gateway, which runs them: of each key one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from backends import background
from gateway.batches.api import add_batches
from gateway.batches.run import BatchRun
from gateway.batches.storage import Document, Storage
from gateway.batches.throttle import Throttle
from gateway.rooms import Room

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gateway.config.settings import PoolSettings
    from gateway.service.assembly import Gateway

_POLL_S: Final = 2.0


class BatchesRoom(Room):
    """Keeps files and batches, and runs those that are open and that no other gateway runs."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._settings = gateway.settings.batches
        self._throttles: dict[str, Throttle] = {}  # by model
        self._running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._has_news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

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
    def client_paths(settings: PoolSettings) -> Sequence[str]:
        """Return the paths of files and batches."""
        return () if settings.batches is None else ("/v1/files", "/v1/batches")

    def add_routes(self, app: FastAPI) -> None:
        """Add the paths of files and batches."""
        if self._settings is not None:
            self._storage = Storage(self._settings.url)
            add_batches(app, self.gateway, self._settings, self._storage, self._has_news.set)

    def start(self) -> None:
        """Start looking for batches to run."""
        if self._settings is not None:
            self._looking = background.keep_running("batches", self._run)

    async def stop(self) -> None:
        """End what runs, so that others can go on with it."""
        if self._looking is not None:
            self._looking.cancel()
            for run, _ in self._running.values():
                run.end()
            await asyncio.gather(self._looking, *(task for _, task in self._running.values()), return_exceptions=True)

    def tick(self) -> None:
        """Update the series."""
        for throttle in self._throttles.values():
            throttle.show()

    async def _run(self) -> None:
        markers: dict[str, Document] = {}
        while True:
            self._has_news.clear()
            names = await asyncio.to_thread(self._storage.names, "open")
            for name in names:
                is_new = name not in markers and not name.endswith(".cancel")
                if is_new and (marker := await asyncio.to_thread(self._storage.read, f"open/{name}")) is not None:
                    markers[name] = marker
            markers = {name: markers[name] for name in names if name in markers}
            self._running = {name: each for name, each in self._running.items() if not each[1].done()}
            for name, marker in markers.items():
                self._begin_or_end(name, marker, is_cancelled=f"{name}.cancel" in names)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._has_news.wait()

    def _begin_or_end(self, name: str, marker: Document, *, is_cancelled: bool) -> None:
        end = "expired" if time.time() > marker["expires_at"] else "cancelled" if is_cancelled else ""
        is_busy = any(each.startswith(marker["owner"]) for each in self._running)
        if name not in self._running and (end or not is_busy):
            run = BatchRun(self.gateway, self._storage, marker, self._throttle_of)
            self._running[name] = run, background.start("batches", self._run_one(run), of=marker["id"])
        if end and name in self._running:
            self._running[name][0].end(end)

    async def _run_one(self, run: BatchRun) -> None:
        assert self._settings is not None
        await run.run(self._settings.max_lines)
        if run.is_ended:
            self._has_news.set()

    def _throttle_of(self, model: str) -> Throttle:
        assert self._settings is not None
        if model not in self._throttles:
            self._throttles[model] = Throttle(self.gateway, model, self._settings.max_in_flight)
        return self._throttles[model]
