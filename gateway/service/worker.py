"""A worker: a gateway process that shares its port with others, and gets settings and replicas from its parent."""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends import background
from backends.backend import Backend
from gateway.config.settings import PoolSettings
from gateway.gateway import Trial
from gateway.listening.listener import listen
from gateway.reload.reloader import ReloadError
from gateway.service.assembly import assemble
from gateway.service.change import prepare
from gateway.service.server import Server
from gateway.telemetry.log_format import configure_logging

log = logging.getLogger(__name__)

ALIVE_S = 1.0
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Configuration:
    """Message to a worker: serve with these settings and replicas from now on."""

    number: int  # grows with each change
    settings: PoolSettings
    backends: Sequence[Backend]
    admin_digest: bytes  # SHA-256 of the admin key


@dataclass(frozen=True, slots=True)
class Alive:
    """Message from a worker, each second and after each change: its event loop runs, and it accepts connections."""

    number: int  # of the last change that it made, or could not make
    problem: str = ""  # why that change failed; empty if it did not
    is_ready: bool = False  # whether each model has had a replica that is up
    in_flight: int = 0  # its requests in flight


@dataclass(frozen=True, slots=True)
class ReloadWanted:
    """Message from a worker: a client requests a reload at `/admin/reload`.

    Answers come in the order of these requests: the lines that changed, or the `ReloadError`.
    """

    dry_run: bool
    trial: Trial | None


class Link:
    """One end of the socket between a worker and its parent. Sending never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, opened: socket.socket) -> Link:
        """Return the end on an open socket."""
        return cls(*await asyncio.open_unix_connection(sock=opened))

    def send(self, message: object) -> None:
        """Send a message; do nothing if the other process has exited."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES) + data)

    async def messages(self) -> AsyncIterator[Any]:
        """Yield messages until the other process exits."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
                yield pickle.loads(await self._reader.readexactly(length))  # noqa: S301 -- sent by this gateway
        except (asyncio.IncompleteReadError, OSError):
            return

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that a worker needs to start."""

    worker: int  # from 0
    current: Configuration
    places: Sequence[socket.socket | tuple[str, int]]  # where all workers listen: passed sockets, or hosts and ports
    run_dir: Path


class Worker:
    """The part of a worker process that talks with its parent."""

    def __init__(self, current: Configuration, run_dir: Path, link: Link) -> None:
        self.gateway = assemble(
            current.settings, current.backends, current.admin_digest, run_dir=run_dir, reload=self._ask_reload
        )
        self._alive = Alive(current.number)
        self._link = link
        self._asked: deque[asyncio.Future[list[str]]] = deque()

    async def show_life(self) -> None:
        """Send `Alive` to the parent every second, as long as the event loop runs."""
        while True:
            if not self._alive.is_ready and self.gateway.is_ready():
                self._alive = replace(self._alive, is_ready=True)
            self._link.send(replace(self._alive, in_flight=len(self.gateway.relay.exchanges)))
            await asyncio.sleep(ALIVE_S)

    async def follow(self) -> None:
        """Handle the parent's messages until it exits."""
        async for message in self._link.messages():
            match message:
                case Configuration():
                    await self._change(message)
                case list() | ReloadError():
                    answer = self._asked.popleft()
                    if answer.done():  # its client has gone
                        continue
                    if isinstance(message, list):
                        answer.set_result(message)
                    else:
                        answer.set_exception(message)

    async def _ask_reload(self, *, dry_run: bool, trial: Trial | None = None) -> list[str]:
        self._asked.append(asyncio.get_running_loop().create_future())
        answer = self._asked[-1]
        self._link.send(ReloadWanted(dry_run, trial))
        return await answer

    async def _change(self, current: Configuration) -> None:
        problem = ""
        try:
            change = await prepare(self.gateway, current.settings, current.backends, current.admin_digest)
            change.commit()
        except Exception as error:
            log.exception("this worker cannot make a change")
            problem = type(error).__name__
        self._alive = replace(self._alive, number=current.number, problem=problem)
        self._link.send(self._alive)


def work(assignment: Assignment, link: socket.socket) -> None:
    """Run a worker process; the target of `multiprocessing.Process`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent reloads
    level = logging.INFO if assignment.worker == 0 else logging.ERROR  # all would log the same messages about the pool
    configure_logging(level, assignment.current.settings.telemetry.log_format, assignment.worker)
    background.end_process(background.run_process(_work(assignment, link)))


async def _work(assignment: Assignment, link: socket.socket) -> int:
    worker = Worker(assignment.current, assignment.run_dir, await Link.over(link))
    tasks: list[asyncio.Task[None]] = []

    async def follow() -> None:
        await worker.follow()
        server.drain()

    def on_started() -> None:
        tasks.append(background.keep_running("workers", worker.show_life, of="sign of life"))
        tasks.append(background.start("workers", follow()))

    server = Server(worker.gateway, has_process=True, on_started=on_started)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C also reaches the parent, which terminates the workers
    places = assignment.places
    sockets = [each if isinstance(each, socket.socket) else listen(*each, shared=True, checked=True) for each in places]
    await server.serve_at(*sockets)
    for task in tasks:
        task.cancel()
    return 0 if server.started else 1
