"""How many lines of a model run at once: as many as leave the requests of others alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gateway.batches.line_request import LineRequest

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

_REFUSED_S: Final = 0.5
WAIT_S: Final = 0.05
_DOUBLES_S: Final = 0.25


def places_of(alone_s: float, most: int) -> int:
    """Return how many lines may run on a replica that has had no requests of others for so many seconds.

    Examples
    --------
    >>> [places_of(alone_s, 32) for alone_s in (0.0, 0.3, 1.0, 9.0)]
    [1, 2, 16, 32]
    """
    return min(most, int(2 ** min(30.0, alone_s / _DOUBLES_S)))


class Throttle:
    """The places of the lines of one model in this process.

    A replica with requests of others has one, and those with more lines lose them; alone, twice as many each quarter of
    a second. While a request waits, in the model's queue or in all engines, or a limit is reached, none is given.
    """

    def __init__(self, gateway: Gateway, model: str, most_per_backend: int) -> None:
        self._gateway = gateway
        self._model = model
        self._most_per_backend = most_per_backend
        self._lines = gateway.metrics.counter("gateway_batch_lines")
        self._shown = gateway.metrics.gauge("gateway_batch_lines_in_flight")
        self._left = asyncio.Event()
        self._refused_s = 0.0
        self._shared_s: dict[str, float] = {}  # by backend, when it last had requests of others
        self._places: dict[str, int] = {}  # by backend
        self.requests: dict[LineRequest, None] = {}  # the oldest first
        self.in_flight = 0

    async def enter(self, is_over: Callable[[], bool]) -> bool:
        """Wait for a place; return whether there is one before it `is_over`."""
        while not is_over():
            if self.in_flight < self.places():
                self.in_flight += 1
                return True
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._left.wait()
        return False

    async def enter_again(self, is_over: Callable[[], bool]) -> bool:
        """Wait for a place in the pool, which had none, for a line that keeps its own; see `enter`."""
        self._refused_s = time.monotonic()
        self.in_flight -= 1
        has_place = await self.enter(is_over)
        self.in_flight += not has_place
        return has_place

    def leave(self) -> None:
        """Release a place."""
        self.in_flight -= 1
        self._left.set()

    def count(self, outcome: str) -> None:
        """Count a line that has an answer."""
        self._lines.labels(self._model, outcome).inc()

    def show(self) -> None:
        """Update the gauge."""
        self._shown.labels(self._model).set(self.in_flight)

    def places(self) -> int:
        """Return how many lines may be in flight, and take from each replica those that others have no room for."""
        now_s, queue = time.monotonic(), self._gateway.relay.queues.get(self._model)
        self._places.clear()
        for backend in self._gateway.pool.up(self._model):
            lines = [request for request in self.requests if request.backend == backend.name]
            is_shared = backend.in_flight > len(lines) or backend.load.others > len(lines) / 4  # a report is old
            if is_shared or backend.name not in self._shared_s:
                self._shared_s[backend.name] = now_s
            most = places_of(now_s - self._shared_s[backend.name], self._most_per_backend)
            for request in lines[most:]:
                request.give_up(503)
            self._places[backend.name] = 0 if backend.load.waiting else most
        is_pressed = (queue is not None and queue.waiting) or now_s - self._refused_s < _REFUSED_S
        return 0 if is_pressed else sum(self._places.values())

    def full(self) -> tuple[str, ...]:
        """Return the backends that have no place for another line."""
        lines = Counter(request.backend for request in self.requests)
        return tuple(name for name, places in self._places.items() if lines[name] >= places)
