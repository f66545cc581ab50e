"""The part of a worker process in reloads, which the main process leads."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from backends import background
from gateway.config.settings import PoolSettings
from gateway.reload.messages import (
    ChangePrepared,
    DiscoveryCounted,
    EndChange,
    FailureCounted,
    PrepareChange,
    ReloadAnswered,
    ReloadCounted,
    ReloadWanted,
    ToParent,
    ToWorker,
)
from gateway.reload.reloader import ReloadError
from gateway.service.assembly import Gateway
from gateway.service.change import Change, prepare

log = logging.getLogger(__name__)


class WorkerReload:
    """Prepares and commits changes as the main process says, and passes on the wish for a reload."""

    def __init__(self, worker: int, gateway: Gateway, send: Callable[[ToParent], None]) -> None:
        self._worker = worker
        self._gateway = gateway
        self._send = send  # sends a message to the main process
        self._started = asyncio.Event()
        self._changes: dict[int, asyncio.Task[Change | None]] = {}
        self._asked: dict[int, asyncio.Future[list[str]]] = {}
        self._requests = 0
        gateway.reload = self.ask

    def on_started(self) -> None:
        """Begin with the changes that came before connections were accepted."""
        self._started.set()

    async def ask(self, *, dry_run: bool, restart: str | None = None) -> list[str]:
        """Ask the main process for a reload; see `gateway.reload.reloader.Reloader.reload`."""
        self._requests += 1
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._asked[self._requests] = answer
        self._send(ReloadWanted(self._worker, self._requests, dry_run, restart))
        return await answer

    def receive(self, message: ToWorker) -> None:
        """Handle a message of the main process."""
        match message:
            case PrepareChange():
                self._changes[message.number] = background.start("reloads", self._prepare(message))
            case EndChange(number, commit):
                background.start("reloads", self._end(self._changes.pop(number), commit=commit))
            case ReloadAnswered(request, lines, outcome, problem):
                answer = self._asked.pop(request)
                if answer.done():  # its client has gone
                    pass
                elif outcome is None:
                    answer.set_result(lines)
                else:
                    answer.set_exception(ReloadError(outcome, problem))
            case ReloadCounted() | DiscoveryCounted() | FailureCounted():
                message.count(self._gateway.metrics)

    async def _prepare(self, message: PrepareChange) -> Change | None:
        await self._started.wait()
        settings = share_of_worker(message.settings)
        try:
            change = await prepare(self._gateway, settings, message.backends, message.admin_digest)
        except Exception as error:
            log.exception("worker %d cannot prepare a change", self._worker)
            self._send(ChangePrepared(message.number, self._worker, type(error).__name__))
            return None
        self._send(ChangePrepared(message.number, self._worker))
        return change

    async def _end(self, preparing: asyncio.Task[Change | None], *, commit: bool) -> None:
        change = await preparing  # done, unless this worker was late and the others went on without it
        if change is None:
            return
        if commit:
            change.commit()
        else:
            await change.abandon()


def share_of_worker(settings: PoolSettings) -> PoolSettings:
    """Return the settings with a worker's share of `server.max_in_flight`."""
    server = settings.server
    if server.max_in_flight is None:
        return settings
    share = math.ceil(server.max_in_flight / server.workers)
    return settings.model_copy(update={"server": server.model_copy(update={"max_in_flight": share})})
