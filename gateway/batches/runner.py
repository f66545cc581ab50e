"""What runs the batches of all keys, of each key one at a time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from backends import background
from gateway.batches.records import Document
from gateway.batches.run import BatchRun
from gateway.batches.storage import Storage
from gateway.batches.throttle import Throttle

if TYPE_CHECKING:
    from gateway.config.settings.batches import BatchesSettings
    from gateway.service.assembly import Gateway

_POLL_S: Final = 2.0


class Runner:
    """Runs the batches that are open and that no other gateway runs."""

    def __init__(self, gateway: Gateway, settings: BatchesSettings) -> None:
        self._gateway = gateway
        self.settings = settings
        self.storage = Storage(settings.url)
        self._throttles: dict[str, Throttle] = {}  # by model
        self._markers: dict[str, Document] = {}  # of the batches that are open, by name
        self._running: dict[str, tuple[BatchRun, asyncio.Task[bool]]] = {}
        self._has_news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start looking for batches to run."""
        self._looking = background.keep_running("batches", self._run)

    def look(self) -> None:
        """Look at once: there may be something to run, or to end."""
        self._has_news.set()

    async def stop(self) -> None:
        """End what runs, so that others can go on with it."""
        if self._looking is not None:
            self._looking.cancel()
            for run, _ in self._running.values():
                run.end()
            await asyncio.gather(self._looking, *(task for _, task in self._running.values()), return_exceptions=True)

    def show(self) -> None:
        """Update the series."""
        for throttle in self._throttles.values():
            throttle.show()

    def _throttle_of(self, model: str) -> Throttle:
        if model not in self._throttles:
            self._throttles[model] = Throttle(self._gateway, model, self.settings.max_in_flight)
        return self._throttles[model]

    def _look_after(self, task: asyncio.Task[bool]) -> None:
        if not task.cancelled() and task.exception() is None and task.result():
            self.look()

    async def _run(self) -> None:
        while True:
            names = await asyncio.to_thread(self.storage.names, "open")
            for name in names:
                is_new = name not in self._markers and not name.endswith(".cancel")
                if is_new and (marker := await asyncio.to_thread(self.storage.read, f"open/{name}")) is not None:
                    self._markers[name] = marker
            self._markers = {name: marker for name, marker in self._markers.items() if name in names}
            self._running = {name: each for name, each in self._running.items() if not each[1].done()}
            for name, marker in sorted(self._markers.items(), key=lambda each: str(each[1]["id"])):
                self._begin_or_end(name, marker, is_cancelled=f"{name}.cancel" in names)
            self._has_news.clear()
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._has_news.wait()
            except TimeoutError:
                continue

    def _begin_or_end(self, name: str, marker: Document, *, is_cancelled: bool) -> None:
        end = "expired" if time.time() > marker["expires_at"] else "cancelled" if is_cancelled else ""
        is_busy = any(each.startswith(marker["owner"]) for each in self._running)
        if name not in self._running and (end or not is_busy):
            run = BatchRun(self._gateway, self.storage, self._throttle_of, self.settings.max_lines, marker)
            task = background.start("batches", run.run(), of=marker["id"])
            task.add_done_callback(self._look_after)
            self._running[name] = run, task
        if end and name in self._running:
            self._running[name][0].end(end)
