"""Worker processes on one port: starting, supervising, and passing messages between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop

from backends import background
from backends.backend import Backend
from gateway.config.settings import PoolSettings
from gateway.reload.messages import (
    ChangePrepared,
    Counted,
    EndChange,
    PrepareChange,
    ReloadAnswered,
    ReloadWanted,
    ToParent,
    ToWorker,
)
from gateway.reload.reloader import ReloadError
from gateway.service.worker_messages import (
    Channel,
    Drained,
    Launched,
    WorkerAlive,
    WorkerDied,
    WorkerMessage,
    WorkerMessages,
    WorkerStarted,
)
from gateway.telemetry.log_format import configure_logging

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_BACKOFF_RESET_S = 60.0
"""A worker that ran for so long is restarted after the first backoff again."""
_GRACE_S = 10.0
_ALIVE_S = 1.0
_SILENT_S = 30.0
"""Without a message for so long a worker is killed: its event loop stands still, and its requests with it."""
_START_S = 90.0
"""What a worker may take longer until its first message."""
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
    channel: Channel
    heard_s: float
    dropped: int = 0


class _Change:
    """A change that the workers prepare."""

    def __init__(self, number: int, workers: dict[int, _Worker]) -> None:
        self.number = number
        self.workers = workers
        self.waiting = set(workers)  # the workers that have not answered yet
        self.all_prepared = asyncio.Event()
        self.problem = ""  # why one of them cannot make the change; empty if all can so far

    def answered(self, number: int, worker: _Worker, problem: str = "") -> None:
        """Record that a worker has answered, or has ended: its successor starts with the settings in effect then."""
        if self.workers.get(number) is worker:
            self.waiting.discard(number)
            self.problem = self.problem or (problem and f"worker {number} failed ({problem})")
        if not self.waiting:
            self.all_prepared.set()


class Workers:
    """The worker processes, as managed by their parent."""

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
        self._admin_digest = admin_digest  # SHA-256 of the admin key
        # Hosts and ports that all workers listen on (SO_REUSEPORT): that of the clients, and the admin address.
        self._addresses = addresses
        self._on_started = on_started  # called once all of them accept connections
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
            background.keep_running(
                "workers", partial(self._supervise, number), of=f"number {number}", stopping=self._stopping
            )
            for number in range(self._settings.server.workers)
        ]
        checks = background.keep_running("workers", self._check, of="their state")
        await self._stopping.wait()
        await asyncio.gather(*tasks)
        checks.cancel()
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
        """Change all workers to other settings and replicas, or none of them."""
        change = self._change = _Change(self._change.number + 1, dict(self._workers))
        message = PrepareChange(change.number, settings, backends, admin_digest)
        for worker in change.workers.values():
            worker.channel.send(message)
        try:
            async with asyncio.timeout(_PREPARE_S):
                await change.all_prepared.wait()
        except TimeoutError:
            change.problem = f"no answer of worker {', '.join(map(str, sorted(change.waiting)))}"
        for worker in change.workers.values():
            worker.channel.send(EndChange(change.number, commit=not change.problem))
        if change.problem:
            raise ReloadError("failed", f"The settings could not be applied: {change.problem}.")
        self._settings, self._backends, self._admin_digest = settings, backends, admin_digest
        present = {(backend.model, backend.name) for backend in backends}
        self._drained = {name: message for name, message in self._drained.items() if name in present}
        for number, worker in self._workers.items():
            if change.workers.get(number) is not worker:  # started meanwhile, with the settings before
                worker.channel.send(message)
                worker.channel.send(EndChange(change.number, commit=True))

    def count(self, message: Counted) -> None:
        """Send a worker something to count: the one that was heard of last."""
        if self._workers:
            max(self._workers.values(), key=lambda worker: worker.heard_s).channel.send(message)

    async def _answer_reload(self, wanted: ReloadWanted) -> None:
        worker = self._workers[wanted.worker]
        assert self._reload is not None
        try:
            answer = ReloadAnswered(wanted.request, await self._reload(wanted.dry_run, wanted.restart))
        except ReloadError as error:
            answer = ReloadAnswered(wanted.request, [], error.outcome, error.message)
        worker.channel.send(answer)

    async def _check(self) -> None:
        """Kill workers that are silent, for others to take their place, and note what could not be sent to them."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_ALIVE_S)
            now_s = time.monotonic()
            was_stopped = now_s - before_s > _SILENT_S / 2  # this process, which has read nothing meanwhile
            for number, worker in self._workers.items():
                if was_stopped:
                    worker.heard_s = max(worker.heard_s, now_s)
                elif now_s - worker.heard_s > _SILENT_S:
                    logger.error("worker %d has been silent for %.0f s and is killed", number, now_s - worker.heard_s)
                    worker.process.kill()
                note_dropped(worker.channel, worker.dropped, f"to worker {number}")
                worker.dropped = worker.channel.dropped

    async def _supervise(self, number: int) -> None:
        """Run one worker, and replace it when it dies."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            worker, began_s = self._start(number), time.monotonic()
            code = await self._wait(worker)
            self._forget(number)
            if self._stopping.is_set():
                return
            if time.monotonic() - began_s >= _BACKOFF_RESET_S:
                backoff_s = _FIRST_BACKOFF_S
            logger.warning("worker %d exited with status %s; restarting it in %g s", number, code, backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(2.0 * backoff_s, _MAX_BACKOFF_S)

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        assignment = Assignment(number, self._settings, self._backends, self._admin_digest, self._addresses)
        process = context.Process(target=work, args=(assignment, theirs), name=f"gateway worker {number}")
        process.start()
        theirs.close()
        channel = Channel(ours, partial(self._receive, number), lambda: None)  # of its end `_wait` knows
        worker = self._workers[number] = _Worker(process, channel, time.monotonic() + _START_S)
        for message in (self._launched, *self._drained.values()):
            channel.send(message)
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
        worker.channel.close()
        mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        self._send_all(WorkerDied(number))

    def _receive(self, number: int, message: WorkerMessage | ToParent) -> None:
        worker = self._workers[number]
        worker.heard_s = time.monotonic()
        if isinstance(message, WorkerAlive):
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
                other.channel.send(message)

    def _send_all(self, message: WorkerMessage) -> None:
        for worker in self._workers.values():
            worker.channel.send(message)


def note_dropped(channel: Channel, before: int, where: str) -> None:
    """Log and count the messages that were dropped since the last time."""
    if dropped := channel.dropped - before:
        background.note("workers", BufferError(f"{dropped} messages were dropped"), of=f"messages {where}")


def work(assignment: Assignment, opened: socket.socket) -> None:
    """Run a worker process; the target of `multiprocessing.Process`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent reloads
    level = logging.INFO if assignment.number == 0 else logging.ERROR  # all would log the same about the pool
    configure_logging(level, assignment.settings.telemetry.log_format, assignment.number)
    sys.exit(uvloop.run(_work(assignment, opened)))


async def _work(assignment: Assignment, opened: socket.socket) -> int:
    from gateway.service.assembly import assemble
    from gateway.service.server import Server, listen
    from gateway.service.worker_reload import WorkerReload, share_of_worker

    gateway = assemble(share_of_worker(assignment.settings), assignment.backends, assignment.admin_digest)
    channel = Channel(opened, lambda message: receive(message), lambda: server.drain())  # noqa: PLW0108 -- made below
    worker_messages = WorkerMessages(assignment.number, channel.send)
    gateway.relay.router.locations.on_new = worker_messages.share_response
    reload = WorkerReload(assignment.number, gateway, channel.send)

    def on_started() -> None:
        reload.on_started()
        channel.send(WorkerStarted(assignment.number))

    async def show_life() -> None:
        before = 0
        while True:
            channel.send(WorkerAlive())
            note_dropped(channel, before, "to the main process")
            before = channel.dropped
            await asyncio.sleep(_ALIVE_S)

    server = Server(gateway, worker_messages, has_process=True, on_started=on_started)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C also reaches the parent, which terminates the workers

    def receive(message: WorkerMessage | ToWorker) -> None:
        if isinstance(message, ToWorker):
            reload.receive(message)
        else:
            worker_messages.receive(message, gateway)

    alive = background.keep_running("workers", show_life, of="sign of life")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listen(*address, shared=True, checked=True)) for address in assignment.addresses]
        await server.serve_at(*sockets)
    alive.cancel()
    return 0 if server.started else 1
