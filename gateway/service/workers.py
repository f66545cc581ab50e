"""The parent of workers: starts them, replaces those that exit, and kills silent ones. It carries no request data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from backends import background
from backends.backend import Backend
from backends.files.own_folder import make_own
from gateway.config.settings import PoolSettings
from gateway.reload.reloader import ReloadError
from gateway.service.stores import PEERS
from gateway.service.worker import ALIVE_S, Alive, Assignment, Configuration, Link, ReloadWanted, work

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_BACKOFF_RESET_S = 60.0
"""After a worker has run for this long, the backoff starts over."""
_GRACE_S = 40.0
"""Seconds that a worker may take beyond `drain_s`, since its parts finish their writes at the end."""
_SILENT_S = 30.0
"""A worker without a message for this long is killed: its event loop hangs, and so do its requests."""
_START_S = 90.0
"""Extra seconds that a worker may take until its first message."""
_CHANGE_S = 60.0
"""Most seconds for the workers to apply a change."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    link: Link
    heard_s: float
    said: Alive | None = None  # its last message about itself


class Workers:
    """The worker processes, as managed by their parent."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        reload: Callable[..., Awaitable[list[str]]],
        on_started: Callable[[], None],
    ) -> None:
        self._assignment = assignment  # of the first worker, as of the start
        self._current = assignment.current
        self._reload = reload  # reloads the pool file for a client of a worker
        self._on_started = on_started  # called once all of them accept connections
        self._yet_to_start = set(range(self._current.settings.server.workers))
        self._workers: dict[int, _Worker] = {}
        self._unable = set[int]()  # workers that exited before their first message: a change does not wait for them
        self._news = asyncio.Event()  # set on any worker's message or exit
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Run the workers until `stop` has been called and they have exited."""
        tasks = [
            background.keep_running(
                "workers", partial(self._supervise, number), of=f"number {number}", stopping=self._stopping
            )
            for number in range(self._current.settings.server.workers)
        ]
        checks = background.keep_running("workers", self._check, of="their state")
        await asyncio.gather(*tasks)
        checks.cancel()
        return 0

    def is_ready(self) -> bool:
        """Return whether any worker has seen a replica up for each model."""
        return any(each.said is not None and each.said.is_ready for each in self._workers.values())

    def in_flight(self) -> int:
        """Return the requests in flight in all workers, by their last messages."""
        return sum(worker.said.in_flight for worker in self._workers.values() if worker.said is not None)

    def stop(self) -> None:
        """Ask every worker to drain and exit, and kill it if it does not; a second call aborts their requests."""
        self._stopping.set()
        for worker in self._workers.values():
            worker.process.terminate()
            last_s = self._current.settings.server.drain_s + _GRACE_S
            asyncio.get_running_loop().call_later(last_s, worker.process.kill)

    async def change(self, settings: PoolSettings, backends: Sequence[Backend], admin_digest: bytes) -> None:
        """Change all workers to new settings and replicas; if one fails, change all back."""
        before = self._current
        self._tell(Configuration(before.number + 1, settings, backends, admin_digest))
        problem = ""
        try:
            async with asyncio.timeout(_CHANGE_S):
                while behind := [*filter(self._is_behind, self._workers)]:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            problem = f"no answer of worker {', '.join(map(str, behind))}"
        for number, worker in self._workers.items():
            if worker.said is not None and worker.said.problem:
                problem = f"worker {number} failed ({worker.said.problem})"
        if problem:
            self._tell(replace(before, number=before.number + 2))
            raise ReloadError("failed", f"The settings could not be applied: {problem}.")

    def _tell(self, current: Configuration) -> None:
        self._current = current
        for worker in self._workers.values():
            worker.link.send(current)

    def _is_behind(self, number: int) -> bool:
        said = self._workers[number].said
        return number not in self._unable if said is None else said.number < self._current.number

    async def _check(self) -> None:
        """Kill silent workers, so that they are replaced; make their folders again."""
        while True:
            with background.guarded("workers", of="their folders"):
                self._make_folders()
            before_s = time.monotonic()
            await asyncio.sleep(ALIVE_S)
            now_s = time.monotonic()
            was_stopped = now_s - before_s > _SILENT_S / 2  # this process was suspended, and has read nothing
            for number, worker in self._workers.items():
                if was_stopped:
                    worker.heard_s = max(worker.heard_s, now_s)
                elif now_s - worker.heard_s > _SILENT_S:
                    logger.error("worker %d has been silent for %.0f s and is killed", number, now_s - worker.heard_s)
                    worker.process.kill()

    def _make_folders(self) -> None:
        """Make the folders of the workers, again if somebody has emptied the folder for temporary files."""
        folder = self._assignment.run_dir
        make_own(folder)
        if make_own(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])):
            text = "%s was removed, and is made again; /metrics lacks what the workers counted there until a restart"
            logger.warning(text, folder)
        make_own(folder / PEERS)

    async def _supervise(self, number: int) -> None:
        """Run one worker, and replace it when it exits."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            code = await self._run(number)
            if self._stopping.is_set():
                return
            if time.monotonic() - began_s >= _BACKOFF_RESET_S:
                backoff_s = _FIRST_BACKOFF_S
            logger.warning("worker %d exited with status %s; restarting it in %g s", number, code, backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(2.0 * backoff_s, _MAX_BACKOFF_S)

    async def _run(self, number: int) -> int | None:
        """Run one worker until it exits; return its exit status."""
        from prometheus_client.multiprocess import mark_process_dead

        self._make_folders()
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        with theirs:
            assignment = replace(self._assignment, worker=number, current=self._current)
            process = context.Process(target=work, args=(assignment, theirs), name=f"gateway worker {number}")
            process.start()
        link = await Link.over(ours)
        worker = self._workers[number] = _Worker(process, link, time.monotonic() + _START_S)
        if assignment.current is not self._current:
            link.send(self._current)
        if self._stopping.is_set():
            process.terminate()
        async for message in link.messages():  # until it exits
            worker.heard_s = time.monotonic()
            self._receive(number, worker, message)
        await asyncio.to_thread(process.join)
        if worker.said is None:
            self._unable.add(number)
        link.close()
        del self._workers[number]
        self._news.set()
        mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
        return process.exitcode

    def _receive(self, number: int, worker: _Worker, message: Alive | ReloadWanted) -> None:
        if isinstance(message, ReloadWanted):
            background.start("reloads", self._answer_reload(worker, message))
            return
        worker.said = message
        self._unable.discard(number)
        self._news.set()
        if self._yet_to_start == {number}:
            self._on_started()
        self._yet_to_start.discard(number)

    async def _answer_reload(self, worker: _Worker, wanted: ReloadWanted) -> None:
        try:
            worker.link.send(await self._reload(dry_run=wanted.dry_run, trial=wanted.trial))
        except ReloadError as error:
            worker.link.send(error)
