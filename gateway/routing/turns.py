"""Long work of requests, done in steps, so that nobody else waits for more than one of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

_SHORT_S: Final = 0.005
"""A step that takes less is followed by the next one in the next turn of the event loop."""


class Turns:
    """Takes one step of one request at a time, from each client in turn.

    After a step that took long, as much time goes to everything else: a client that keeps the gateway busy with large
    bodies has at most half of it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Iterator[None]]] = {}
        self._free_s = 0.0
        self._timer: asyncio.Handle | None = None

    def add(self, client: str, steps: Iterator[None]) -> None:
        """Take the steps of a request, after those of the same client that are waiting; they must not raise."""
        self._waiting.setdefault(client, deque()).append(steps)
        if self._timer is None:
            self._continue()

    def _continue(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._free_s - time.perf_counter()
        self._timer = loop.call_later(wait_s, self._step) if wait_s > 0.0 else loop.call_soon(self._step)

    def _step(self) -> None:
        client, waiting = next(iter(self._waiting.items()))
        began_s = time.perf_counter()
        if next(waiting[0], _END) is _END:
            waiting.popleft()
        ended_s = time.perf_counter()
        self._free_s = ended_s + (ended_s - began_s) if ended_s - began_s > _SHORT_S else 0.0
        del self._waiting[client]
        if waiting:
            self._waiting[client] = waiting  # behind the others
        self._timer = None
        if self._waiting:
            self._continue()


_END: Final = object()
