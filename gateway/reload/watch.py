"""Watches the pool file, for users who cannot send a signal, as with a ConfigMap of Kubernetes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 2.0

_Stamp = tuple[int, int, int]


async def watch(path: Path, is_on: Callable[[], bool], on_change: Callable[[], None]) -> None:
    """Call `on_change` when a file has changed and is stable for one interval, until cancelled.

    So a file is not read while it is being written. Links are followed: Kubernetes replaces one of them. The first look
    counts as a change: the file may have changed since it was read.
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
    """Return what changes with a file; None if it cannot be read, as while it is being replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
