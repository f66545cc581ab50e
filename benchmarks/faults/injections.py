"""The faults: what is done to a replica, to the system itself, or to what it leans on, and how it is undone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.faults.asking import MODEL
from benchmarks.faults.engine import HANG, REFUSE, RESET_ACCEPT, WELL
from benchmarks.faults.misbehaviour import ASLEEP, BEHAVIOURS, STANDS_STILL
from benchmarks.faults.stage import Stage
from benchmarks.faults.systems import System

IDLE_CONNECTIONS = 10_000
RELOADS_PER_S = 50.0
_PER_CHANGE = 25
"""Signals for each change of the pool file."""
_STALL_S = 36.0
_DAY_S = 86_400
Inject = Callable[[Stage], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault.

    Parameters
    ----------
    inject
        Context manager: the fault is there while its block runs.
    seconds
        Least length, for faults that a shorter time would not show.
    concerns
        Whether a system can have it.
    is_of_replica
        Whether one replica has it.
    env
        Variables that the system must have been started with.
    """

    name: str
    inject: Inject
    seconds: float = 0.0
    concerns: Callable[[System], bool] = lambda system: not system.has_state
    is_of_replica: bool = True
    env: Callable[[Path], dict[str, str]] = lambda _: {}


def _told(fault: str) -> Inject:
    """Return a fault that the first replica is told to have."""

    @contextlib.asynccontextmanager
    async def inject(stage: Stage) -> AsyncIterator[None]:
        await stage.victim.tell(fault)
        try:
            yield
        finally:
            await stage.victim.tell(WELL)

    return inject


def _freeze(signal_of: Callable[[Stage], Callable[[signal.Signals], None]]) -> Inject:
    """Return what stops a process, given what signals it: it then neither answers nor closes its connections."""

    @contextlib.asynccontextmanager
    async def inject(stage: Stage) -> AsyncIterator[None]:
        send = signal_of(stage)
        send(signal.SIGSTOP)
        try:
            yield
        finally:
            send(signal.SIGCONT)

    return inject


@contextlib.asynccontextmanager
async def _kill(stage: Stage) -> AsyncIterator[None]:
    await stage.victim.kill()
    try:
        yield
    finally:
        await stage.victim.start()


@contextlib.asynccontextmanager
async def _kill_system(stage: Stage) -> AsyncIterator[None]:
    await stage.kill()
    await stage.start()
    yield


@contextlib.asynccontextmanager
async def _restart_system(stage: Stage) -> AsyncIterator[None]:
    await stage.stop()
    await stage.start()
    yield


@contextlib.asynccontextmanager
async def _reload_storm(stage: Stage) -> AsyncIterator[None]:
    """Signal without pause; twice a second a replica has another weight."""
    async with _reloads(stage, lambda backends: backends["b3"].update(weight=2.0)):
        yield


@contextlib.asynccontextmanager
async def _replica_removed(stage: Stage) -> AsyncIterator[None]:
    """Take a replica out of the pool file twice a second, and put it back."""
    async with _reloads(stage, lambda backends: backends.pop("b3")):
        yield


@contextlib.asynccontextmanager
async def _reloads(stage: Stage, change: Callable[[dict[str, Any]], object]) -> AsyncIterator[None]:
    pool = stage.site.pool
    before = pool.read_text() if pool.exists() else ""  # a peer has none
    changed = _changed(before, change) if before else ""

    async def storm() -> None:
        for number in count(1):
            if before and number % _PER_CHANGE == 0:
                _replace(pool, changed if number % (2 * _PER_CHANGE) else before)
            stage.signal(signal.SIGHUP)
            await asyncio.sleep(1.0 / RELOADS_PER_S)

    task = asyncio.create_task(storm())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if before:
            _replace(pool, before)
            stage.signal(signal.SIGHUP)


def _changed(pool: str, change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(pool)
    change(document["models"][MODEL]["backends"])
    return json.dumps(document)


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


@contextlib.asynccontextmanager
async def idle_connections(stage: Stage, number: int = IDLE_CONNECTIONS) -> AsyncIterator[None]:
    """Open connections that send nothing."""
    opened: list[socket.socket] = []
    try:
        while len(opened) < number:
            for _ in range(100):
                connection = socket.socket()
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", stage.port))
                opened.append(connection)
            await asyncio.sleep(0.02)
        yield
    finally:
        for connection in opened:
            connection.close()


@contextlib.asynccontextmanager
async def _kill_redis(stage: Stage) -> AsyncIterator[None]:
    stage.redis.kill()
    try:
        yield
    finally:
        stage.redis.start()


@contextlib.asynccontextmanager
async def _fill_disk(stage: Stage) -> AsyncIterator[None]:
    stage.disk.fill(stage.pids)
    try:
        yield
    finally:
        stage.disk.free(stage.pids)


def _clock_file(folder: Path) -> Path:
    return folder / "clock"


def _fake_clock(folder: Path) -> dict[str, str]:
    """Return the environment in which the clock of the day follows a file (libfaketime); monotonic time goes on."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        raise FileNotFoundError("libfaketime")
    _clock_file(folder).write_text("+0")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(_clock_file(folder)),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@contextlib.asynccontextmanager
async def _clock_jumps(stage: Stage) -> AsyncIterator[None]:
    """Set the clock ahead by a day and back by two, over and over."""

    async def jump() -> None:
        while True:
            for offset_s in (_DAY_S, -_DAY_S):
                _clock_file(stage.site.folder).write_text(f"{offset_s:+d}")
                await asyncio.sleep(1.0)

    task = asyncio.create_task(jump())
    try:
        yield
    finally:
        task.cancel()
        _clock_file(stage.site.folder).write_text("+0")


def _is_gateway(system: System) -> bool:
    return system.name.startswith("gateway") and not system.has_state


def _stateful(system: System) -> bool:
    return system.has_state


def _of_replica() -> list[Injection]:
    # What such a replica took it never answers, so it has to last until a probe has seen it.
    least_s = dict.fromkeys(("stall", "stall-middle", STANDS_STILL), _STALL_S) | dict.fromkeys((HANG, ASLEEP), 10.0)
    told = [HANG, REFUSE, RESET_ACCEPT, *BEHAVIOURS]
    return [
        Injection("kill", _kill),
        Injection("freeze", _freeze(lambda stage: stage.victim.signal), seconds=10.0),
        *(Injection(name, _told(name), seconds=least_s.get(name, 0.0)) for name in told),
    ]


INJECTIONS = {
    injection.name: injection
    for injection in (
        *_of_replica(),
        Injection("system-kill", _kill_system, is_of_replica=False),
        Injection("system-restart", _restart_system, is_of_replica=False),
        Injection("reload-storm", _reload_storm, concerns=lambda system: system.reloads, is_of_replica=False),
        Injection("replica-removed", _replica_removed, concerns=_is_gateway, is_of_replica=False),
        Injection("idle-connections", idle_connections, is_of_replica=False),
        Injection("redis-kill", _kill_redis, concerns=lambda each: "Redis" in each.name, is_of_replica=False),
        Injection(
            "redis-freeze",
            _freeze(lambda stage: stage.redis.signal),
            concerns=lambda each: "Redis" in each.name,
            is_of_replica=False,
        ),
        Injection("disk-full", _fill_disk, concerns=_stateful, is_of_replica=False),
        Injection("clock-jumps", _clock_jumps, is_of_replica=False, env=_fake_clock),
    )
}
"""By their names."""
