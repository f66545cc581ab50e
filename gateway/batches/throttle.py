"""How many lines of a model run at once: as many as leave the requests of others alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

_PERIOD_S: Final = 0.5
_WAIT_S: Final = 0.25


class Throttle:
    """The places of the lines of one model in this process.

    Their number grows by one for each replica and half second in which all were taken, and is halved in each in which
    requests wait: in the model's queue, or in an engine, or because a limit is reached. Then none is given.
    """

    def __init__(self, gateway: Gateway, model: str, most_per_backend: int) -> None:
        self._gateway = gateway
        self._model = model
        self._most_per_backend = most_per_backend
        self._lines = gateway.metrics.counter("gateway_batch_lines")
        self._shown = gateway.metrics.gauge("gateway_batch_lines_in_flight")
        self._left = asyncio.Event()
        self._adapted_s = self._refused_s = time.monotonic()
        self._was_full = False
        self.places = 1.0
        self.in_flight = 0

    async def enter(self, is_over: Callable[[], bool]) -> bool:
        """Wait for a place; return whether there is one before it `is_over`."""
        while not is_over():
            self._adapt()
            if self.in_flight < int(self.places) and not self._is_pressed():
                self.in_flight += 1
                self._was_full |= self.in_flight >= int(self.places)
                return True
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
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
        """Give a place back."""
        self.in_flight -= 1
        self._left.set()

    def count(self, outcome: str) -> None:
        """Count a line that has an answer."""
        self._lines.labels(self._model, outcome).inc()

    def show(self) -> None:
        """Update the gauge."""
        self._shown.labels(self._model).set(self.in_flight)

    def _is_pressed(self) -> bool:
        """Return whether requests wait."""
        queue = self._gateway.relay.queues.get(self._model)
        if (queue is not None and queue.waiting) or time.monotonic() - self._refused_s < _PERIOD_S:
            return True
        return any(backend.load.waiting for backend in self._gateway.pool.up(self._model))

    def _adapt(self) -> None:
        now_s = time.monotonic()
        if now_s - self._adapted_s < _PERIOD_S:
            return
        backends, self._adapted_s = len(self._gateway.pool.up(self._model)), now_s
        if self._is_pressed():
            self.places = max(1.0, self.places / 2)
        elif self._was_full:
            self.places = max(1.0, min(self.places + backends, backends * self._most_per_backend))
        self._was_full = self.in_flight >= int(self.places)
