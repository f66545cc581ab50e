"""Where the lines of a model may run in this process: the places of all its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway.batches.line_request import LineRequest
from gateway.batches.lines import Line
from gateway.batches.places import Places

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

WAIT_S: Final = 0.05
_MOST_HELD_BYTES: Final = 64 << 20
"""Of bodies of lines in flight; a single line may be larger."""


class Throttle:
    """The places of the lines of one model in this process."""

    def __init__(self, gateway: Gateway, model: str, most_per_backend: int) -> None:
        self._gateway = gateway
        self._model = model
        self._most_per_backend = most_per_backend
        self._lines = gateway.metrics.counter("gateway_batch_lines")
        self._shown = gateway.metrics.gauge("gateway_batch_lines_in_flight")
        self._places: dict[str, Places] = {}  # by backend
        self._seen: dict[str, int] = {}  # by backend: how many requests of others were sent to it
        self._sent: dict[str, int] = {}  # by backend: how many lines
        self._requests: dict[Line, LineRequest | None] = {}  # of all lines that have a place
        self._unsent: set[Line] = set()  # those that are at no backend yet
        self._held_bytes = 0
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait until there may be a place."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._changed.wait()

    def closed_to(self, line: Line, caps: Mapping[str, int]) -> tuple[str, ...] | None:
        """Return the backends that have no place for a line, or as many as `caps` allow; None if all are such."""
        queue, up = self._gateway.relay.queues.get(self._model), self._gateway.pool.up(self._model)
        others, held_bytes = len(self._unsent - {line}), self._held_bytes - (line in self._requests) * len(line.body)
        if (queue is not None and queue.waiting) or (held_bytes and held_bytes + len(line.body) > _MOST_HELD_BYTES):
            return None
        now_s, open_ones = time.monotonic(), set[str]()
        for backend in up:
            places = self._places.get(backend.name)
            if places is None or len(places.lines) >= caps.get(backend.name, len(places.lines) + 1):
                continue
            if places.may_begin(now_s, line, others):
                open_ones.add(backend.name)
        return tuple([each.name for each in up if each.name not in open_ones]) if open_ones else None

    def lines_at(self, backend: str) -> int:
        """Return how many lines are at a backend."""
        return len(self._places[backend].lines) if backend in self._places else 0

    def enter(self, line: Line) -> None:
        """Give a line a place, which `leave` releases."""
        self._unsent.add(line)
        self._requests[line] = None
        self._held_bytes += len(line.body)

    def begin(self, line: Line, request: LineRequest) -> None:
        """Keep the request of a line, by which it is given up."""
        self._requests[line] = request

    def sent(self, line: Line, backend: str) -> None:
        """Note that a line is sent to a backend, perhaps after another one."""
        self._unsent.discard(line)
        for places in self._places.values():
            places.end(line)
        self._places_of(backend).lines[line] = None
        self._sent[backend] = self._sent.get(backend, 0) + 1

    def answered(self, backend: str, took_s: float) -> None:
        """Count a line that an engine has answered."""
        self._places_of(backend).answered(took_s)

    def leave(self, line: Line) -> None:
        """Release the place of a line."""
        if self._requests.pop(line, self) is not self:
            self._held_bytes -= len(line.body)
        self._unsent.discard(line)
        for places in self._places.values():
            places.end(line)
        self._changed.set()

    def count(self, outcome: str) -> None:
        """Count a line that has its answer."""
        self._lines.labels(self._model, outcome).inc()

    def look(self) -> None:
        """See where there are requests of others, and give up the lines that they have no room for."""
        now_s = time.monotonic()
        for backend in self._gateway.pool.up(self._model):
            name, places = backend.name, self._places_of(backend.name)
            others, lines = backend.sent - self._sent.get(name, 0), len(places.lines)
            is_shared = backend.in_flight > lines or backend.load.others > lines / 4  # a report is old
            has_come = others != self._seen.get(name, others)
            self._seen[name], places.waiting = others, backend.load.waiting
            for line in places.look(now_s, is_shared=is_shared, has_come=has_come):
                request = self._requests.get(line)
                if request is not None and request.give_up():
                    line.given_up += 1
                    places.gave_up()
        self._changed.set()

    def show(self) -> None:
        """Update the gauge."""
        self._shown.labels(self._model).set(len(self._requests))

    def _places_of(self, backend: str) -> Places:
        if backend not in self._places:
            self._places[backend] = Places(self._most_per_backend, time.monotonic())
        return self._places[backend]
