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
from inspect import isawaitable
from itertools import count, cycle
from pathlib import Path
from typing import Any

from benchmarks.faults.asking import MODEL
from benchmarks.faults.engine import HANG, REFUSE, RESET_ACCEPT, WELL
from benchmarks.faults.load import meanwhile
from benchmarks.faults.misbehaviour import ASLEEP, BEHAVIOURS, STANDS_STILL
from benchmarks.faults.stage import Stage
from benchmarks.systems import System

IDLE_CONNECTIONS = 10_000
RELOADS_PER_S = 50.0
_PER_CHANGE = 25
"""Signals for each change of the pool file."""
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
    env
        Variables that the system must have been started with.
    """

    name: str
    inject: Inject
    seconds: float = 0.0
    concerns: Callable[[System], bool] = lambda system: not system.has_state
    env: Callable[[Path], dict[str, str]] = lambda _: {}


def _between(begin: Callable[[Stage], Any], end: Callable[[Stage], Any] = lambda _: None) -> Inject:
    """Return what does one thing, and another at the end; either may have to be awaited."""

    async def done(result: Any) -> None:
        if isawaitable(result):
            await result

    @contextlib.asynccontextmanager
    async def inject(stage: Stage) -> AsyncIterator[None]:
        await done(begin(stage))
        try:
            yield
        finally:
            await done(end(stage))

    return inject


def _told(fault: str) -> Inject:
    """Return a fault that the first replica is told to have."""
    return _between(lambda stage: stage.victim.tell(fault), lambda stage: stage.victim.tell(WELL))


def _freeze(signal_of: Callable[[Stage], Callable[[signal.Signals], None]]) -> Inject:
    """Return what stops a process, given what signals it: it then neither answers nor closes its connections."""
    return _between(lambda stage: signal_of(stage)(signal.SIGSTOP), lambda stage: signal_of(stage)(signal.SIGCONT))


async def _kill_system(stage: Stage) -> None:
    await stage.kill()
    await stage.start()


async def _restart_system(stage: Stage) -> None:
    await stage.stop()
    await stage.start()


def _reloads(change: Callable[[dict[str, Any]], object]) -> Inject:
    """Return what signals without pause; twice a second the replicas in the pool file are others."""

    @contextlib.asynccontextmanager
    async def inject(stage: Stage) -> AsyncIterator[None]:
        pool = stage.site.pool
        before = pool.read_text() if pool.exists() else ""  # a peer has none
        changed = _changed(before, change) if before else ""

        async def storm() -> None:
            for number in count(1):
                if before and number % _PER_CHANGE == 0:
                    _replace(pool, changed if number % (2 * _PER_CHANGE) else before)
                stage.signal(signal.SIGHUP)
                await asyncio.sleep(1.0 / RELOADS_PER_S)

        async with meanwhile(storm()):
            yield
        if before:
            _replace(pool, before)
            stage.signal(signal.SIGHUP)

    return inject


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
        for offset_s in cycle((_DAY_S, -_DAY_S)):
            _clock_file(stage.site.folder).write_text(f"{offset_s:+d}")
            await asyncio.sleep(1.0)

    async with meanwhile(jump()):
        yield
    _clock_file(stage.site.folder).write_text("+0")


def _is_gateway(system: System) -> bool:
    return system.name.startswith("gateway") and not system.has_state


def _has_redis(system: System) -> bool:
    return "Redis" in system.name


# What such a replica took it never answers, so it has to last until a probe has seen it.
_LEAST_S = dict.fromkeys(("stall", "stall-middle", STANDS_STILL), 36.0) | dict.fromkeys((HANG, ASLEEP), 10.0)
INJECTIONS = {
    each.name: each
    for each in (
        Injection("kill", _between(lambda stage: stage.victim.kill(), lambda stage: stage.victim.start())),
        Injection("freeze", _freeze(lambda stage: stage.victim.signal), seconds=10.0),
        *(Injection(name, _told(name), _LEAST_S.get(name, 0.0)) for name in (HANG, REFUSE, RESET_ACCEPT, *BEHAVIOURS)),
        Injection("system-kill", _between(_kill_system)),
        Injection("system-restart", _between(_restart_system)),
        Injection(
            "reload-storm", _reloads(lambda backends: backends["b3"].update(weight=2.0)), 0.0, lambda each: each.reloads
        ),
        Injection("replica-removed", _reloads(lambda backends: backends.pop("b3")), 0.0, _is_gateway),
        Injection("idle-connections", idle_connections),
        Injection(
            "redis-kill",
            _between(lambda stage: stage.redis.kill(), lambda stage: stage.redis.start()),
            0.0,
            _has_redis,
        ),
        Injection("redis-freeze", _freeze(lambda stage: stage.redis.signal), 0.0, _has_redis),
        Injection(
            "disk-full",
            _between(lambda stage: stage.disk.fill(stage.pids), lambda stage: stage.disk.free(stage.pids)),
            0.0,
            lambda each: each.has_state,
        ),
        Injection("clock-jumps", _clock_jumps, env=_fake_clock),
    )
}
"""By their names."""
