"""Worker processes on one port: starting, supervising, and passing messages between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop

from backends import background
from backends.backend import Backend
from gateway.config.settings import PoolSettings
from gateway.reload.messages import (
    ChangePrepared,
    DiscoveryCounted,
    EndChange,
    PrepareChange,
    ReloadAnswered,
    ReloadCounted,
    ReloadWanted,
    ToParent,
    ToWorker,
)
from gateway.reload.reloader import ReloadError
from gateway.service.worker_messages import (
    Drained,
    Launched,
    Reported,
    WorkerDied,
    WorkerMessage,
    WorkerMessages,
    WorkerStarted,
)
from gateway.telemetry.log_format import configure_logging

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_GRACE_S = 10.0
_PREPARE_S = 60.0
"""How long the workers may take to prepare a change; one that starts meanwhile has to start first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The settings of a worker process, pickled when it is spawned."""

    number: int
    settings: PoolSettings
    backends: Sequence[Backend]
    admin_digest: bytes
    addresses: Sequence[tuple[str, int]]


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection


class _Change:
    """A change that the workers prepare.

    Attributes
    ----------
    waiting
        The workers that have not answered yet.
    problem
        Why one of them cannot make the change; empty if all can so far.
    """

    def __init__(self, number: int, workers: dict[int, _Worker]) -> None:
        self.number = number
        self.workers = workers
        self.waiting = set(workers)
        self.all_prepared = asyncio.Event()
        self.problem = ""

    def answered(self, number: int, worker: _Worker, problem: str = "") -> None:
        """Record that a worker has answered, or has ended: its successor starts with the settings in effect then."""
        if self.workers.get(number) is worker:
            self.waiting.discard(number)
            self.problem = self.problem or (problem and f"worker {number} failed ({problem})")
        if not self.waiting:
            self.all_prepared.set()


class Workers:
    """The worker processes, as managed by their parent.

    Parameters
    ----------
    admin_digest
        SHA-256 of the admin key.
    addresses
        Hosts and ports that all workers listen on (SO_REUSEPORT): that of the clients, and the admin address.
    run_dir
        Folder for the shared values of their metrics.
    on_started
        Called once all of them accept connections.
    """

    def __init__(
        self,
        settings: PoolSettings,
        backends: Sequence[Backend],
        admin_digest: bytes,
        addresses: Sequence[tuple[str, int]],
        run_dir: Path,
        on_started: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._backends = backends
        self._admin_digest = admin_digest
        self._addresses = addresses
        self._on_started = on_started
        self._yet_to_start = set(range(settings.server.workers))
        self._workers: dict[int, _Worker] = {}
        self._drained: dict[tuple[str, str], Drained] = {}
        self._launched = Launched({})
        self._change = _Change(0, {})
        self._reload: Callable[[bool, str | None], Awaitable[list[str]]] | None = None
        self._stopping = asyncio.Event()
        metrics_dir = run_dir / "metrics"
        metrics_dir.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_dir)

    async def run(self) -> int:
        """Run the workers until `stop`, then wait for them to end."""
        tasks = [
            background.keep_running("workers", partial(self._supervise, number), stopping=self._stopping)
            for number in range(self._settings.server.workers)
        ]
        await self._stopping.wait()
        await asyncio.gather(*tasks)
        return 0

    def stop(self) -> None:
        """Ask every worker to drain and end; a second call aborts their requests."""
        self._stopping.set()
        for worker in self._workers.values():
            worker.process.terminate()

    def send_launched(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Send the workers the status of the replicas that the gateway started."""
        self._launched = Launched(replicas)
        self._send_all(self._launched)

    def reload_with(self, reload: Callable[[bool, str | None], Awaitable[list[str]]]) -> None:
        """Set what reloads the pool file when a client of a worker asks for it, given `dry_run` and `restart`."""
        self._reload = reload

    async def change(self, settings: PoolSettings, backends: Sequence[Backend], admin_digest: bytes) -> None:
        """Change all workers to other settings and replicas, or none of them.

        Raises
        ------
        ReloadError
            If one of them cannot, or does not answer in time.
        """
        change = self._change = _Change(self._change.number + 1, dict(self._workers))
        message = PrepareChange(change.number, settings, backends, admin_digest)
        for worker in change.workers.values():
            self._send(worker, message)
        try:
            async with asyncio.timeout(_PREPARE_S):
                await change.all_prepared.wait()
        except TimeoutError:
            change.problem = f"no answer of worker {', '.join(map(str, sorted(change.waiting)))}"
        for worker in change.workers.values():
            self._send(worker, EndChange(change.number, commit=not change.problem))
        if change.problem:
            raise ReloadError("failed", f"The settings could not be applied: {change.problem}.")
        self._settings, self._backends, self._admin_digest = settings, backends, admin_digest
        present = {(backend.model, backend.name) for backend in backends}
        self._drained = {name: message for name, message in self._drained.items() if name in present}
        for number, worker in self._workers.items():
            if change.workers.get(number) is not worker:  # started meanwhile, with the settings before
                self._send(worker, message)
                self._send(worker, EndChange(change.number, commit=True))

    def count(self, message: ReloadCounted | DiscoveryCounted) -> None:
        """Send a worker a reload, or an answer of a source of replicas, to count."""
        if self._workers:
            self._send(self._workers[min(self._workers)], message)

    async def _answer_reload(self, wanted: ReloadWanted) -> None:
        worker = self._workers[wanted.worker]
        assert self._reload is not None
        try:
            answer = ReloadAnswered(wanted.request, await self._reload(wanted.dry_run, wanted.restart))
        except ReloadError as error:
            answer = ReloadAnswered(wanted.request, [], error.outcome, error.message)
        self._send(worker, answer)

    async def _supervise(self, number: int) -> None:
        """Run one worker, and replace it when it dies."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            worker = self._start(number)
            code = await self._wait(worker)
            self._forget(number)
            if self._stopping.is_set():
                return
            logger.warning("worker %d exited with status %s; restarting it in %g s", number, code, backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(2.0 * backoff_s, _MAX_BACKOFF_S)

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        assignment = Assignment(number, self._settings, self._backends, self._admin_digest, self._addresses)
        process = context.Process(target=work, args=(assignment, theirs), name=f"gateway worker {number}")
        process.start()
        theirs.close()
        worker = self._workers[number] = _Worker(process, ours)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive, number)
        state: list[WorkerMessage] = [self._launched, *self._drained.values()]
        for message in state:
            self._send(worker, message)
        return worker

    async def _wait(self, worker: _Worker) -> int | None:
        """Return the exit status of a worker; after `stop`, kill it if it does not end in time."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        sentinel = worker.process.sentinel

        def on_exit() -> None:
            loop.remove_reader(sentinel)
            ended.set()

        loop.add_reader(sentinel, on_exit)
        stopping = background.start("workers", self._stopping.wait())
        waiting = background.start("workers", ended.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.wait({waiting}, timeout=self._settings.server.drain_s + _GRACE_S)
        if not ended.is_set():
            worker.process.kill()
            await waiting
        worker.process.join()
        return worker.process.exitcode

    def _forget(self, number: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        worker = self._workers.pop(number)
        self._change.answered(number, worker)
        asyncio.get_running_loop().remove_reader(worker.pipe.fileno())
        worker.pipe.close()
        mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        self._send_all(WorkerDied(number))

    def _receive(self, number: int) -> None:
        worker = self._workers[number]
        try:
            message: WorkerMessage | ToParent = worker.pipe.recv()
        except (EOFError, OSError):  # the worker has ended; `_wait` handles that
            asyncio.get_running_loop().remove_reader(worker.pipe.fileno())
            return
        if isinstance(message, ChangePrepared):
            if message.number == self._change.number:
                self._change.answered(number, worker, message.problem)
            return
        if isinstance(message, ReloadWanted):
            background.start("reloads", self._answer_reload(message))
            return
        if isinstance(message, WorkerStarted):
            if self._yet_to_start == {message.worker}:
                self._on_started()
            self._yet_to_start.discard(message.worker)
            return
        if isinstance(message, Drained):
            self._drained[message.model, message.backend] = message
        for other_number, other in self._workers.items():
            if other_number != number:
                self._send(other, message)

    def _send_all(self, message: WorkerMessage) -> None:
        for worker in self._workers.values():
            self._send(worker, message)

    @staticmethod
    def _send(worker: _Worker, message: WorkerMessage | ToWorker) -> None:
        with contextlib.suppress(OSError):  # the worker has ended; `_wait` handles that
            send(worker.pipe, message)


def send(pipe: Connection, message: WorkerMessage | ToWorker) -> None:
    """Send a message; one that the next will replace is left out if the other side does not read, so as not to wait."""
    if isinstance(message, Reported):
        poll = select.poll()
        poll.register(pipe, select.POLLOUT)
        if not poll.poll(0):
            return
    pipe.send(message)


def work(assignment: Assignment, pipe: Connection) -> None:
    """Run a worker process; the target of `multiprocessing.Process`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent reloads
    level = logging.INFO if assignment.number == 0 else logging.ERROR  # all would log the same about the pool
    configure_logging(level, assignment.settings.telemetry.log_format, assignment.number)
    sys.exit(uvloop.run(_work(assignment, pipe)))


async def _work(assignment: Assignment, pipe: Connection) -> int:
    from gateway.service.assembly import assemble
    from gateway.service.server import Server, listen
    from gateway.service.worker_reload import WorkerReload, share_of_worker

    gateway = assemble(share_of_worker(assignment.settings), assignment.backends, assignment.admin_digest)
    worker_messages = WorkerMessages(assignment.number, functools.partial(send, pipe))
    gateway.relay.router.locations.on_new = worker_messages.share_response
    reload = WorkerReload(assignment.number, gateway, pipe.send)

    def on_started() -> None:
        reload.on_started()
        pipe.send(WorkerStarted(assignment.number))

    server = Server(gateway, worker_messages, has_process=True, on_started=on_started)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C also reaches the parent, which terminates the workers

    def receive() -> None:
        try:
            message: WorkerMessage | ToWorker = pipe.recv()
        except (EOFError, OSError):  # the parent has ended
            loop.remove_reader(pipe.fileno())
            server.drain()
            return
        if isinstance(message, ToWorker):
            reload.receive(message)
        else:
            worker_messages.receive(message, gateway)

    loop.add_reader(pipe.fileno(), receive)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listen(*address, shared=True, checked=True)) for address in assignment.addresses]
        await server.serve_at(*sockets)
    return 0 if server.started else 1
