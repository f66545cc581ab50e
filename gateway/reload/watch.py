"""Watching the pool file, for those who cannot send a signal, as with a ConfigMap of Kubernetes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 2.0

_Stamp = tuple[int, int, int]


async def watch(path: Path, is_on: Callable[[], bool], on_change: Callable[[], None]) -> None:
    """Call `on_change` when a file has changed and is the same again at the next look; until cancelled.

    So a file that is being written is not read. Links are followed: Kubernetes replaces one of them. The first look at
    the file counts as a change: it may have changed since it was read.
    """
    known: _Stamp | None = None
    before: _Stamp | None = None
    while True:
        if is_on():
            stamp = await asyncio.to_thread(stamp_of, path)
            if stamp is not None and stamp == before and stamp != known:
                known = stamp
                on_change()
            before = stamp
        await asyncio.sleep(INTERVAL_S)


def stamp_of(path: Path) -> _Stamp | None:
    """Return what changes with a file; None if it cannot be looked at, as in the moment when it is replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
