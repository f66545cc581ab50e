"""Decides how many lines run on each replica of a model: as many as do not disturb requests, and will likely finish.

One line has the kept place: it is not given up when a request arrives. The others are, so answered lines must have
earned their loss, and the replica must be likely to stay free of requests for as long as a line takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from gateway.rooms.batches.line_request import LineRequest
from gateway.rooms.batches.lines import Line

if TYPE_CHECKING:
    from gateway.gateway import Gateway

WAIT_S: Final = 0.05
_DOUBLES_S: Final = 0.25
_EARNS, _FIRST, _MOST_SAVED = 0.09, 3.0, 2.0
"""Lines that may be given up: per answered line, initially, and at most per place of a replica."""
_RISKED: Final = 0.5
"""Share of the savings at risk: if all of that is lost at once, half is left."""
_REMEMBERED: Final = 8
_LONG: Final = 0.5
"""In times of a line: shorter pauses are neither used nor remembered."""
_SPREAD: Final = 1.5
"""Time that a line may take, relative to the mean."""


class Places:
    """The places of lines on one replica; all times are by the same clock.

    Examples
    --------
    >>> places, line = Places(128, now_s=0.0), Line(0, "a")
    >>> places.look(0.0, is_shared=False, has_come=False)
    []
    >>> for now_s in (0.0, 0.5, 1.0, 1.5):
    ...     while places.may_begin(now_s, line):
    ...         places.lines[Line(0, "a")] = None
    ...     places.answered(0.1)
    >>> len(places.lines)
    2
    >>> len(places.look(2.0, is_shared=True, has_come=True))
    1
    """

    def __init__(self, most: int, now_s: float) -> None:
        self._most = most
        self._since_s = now_s  # since when there have been no requests of others
        self._is_shared = True
        self._saved = _FIRST
        self._takes_s = 0.0  # mean seconds of a line; 0 until one was answered
        self._pauses = deque[float](maxlen=_REMEMBERED)  # lengths of the last pauses of requests of others
        self.lines: dict[Line, None] = {}  # in flight, oldest first
        self.waiting = 0  # requests that wait in the engine
        self.sent = 0  # lines sent
        self.others: int | None = None  # requests of others sent there so far; None before the first look

    def look(self, now_s: float, *, is_shared: bool, has_come: bool) -> list[Line]:
        """Update how much room other requests leave, and return the lines to give up for them."""
        if is_shared or has_come:
            alone_s = now_s - self._since_s
            if (has_come or not self._is_shared) and alone_s > _LONG * self._takes_s:
                self._pauses.append(alone_s)
            self._since_s = now_s
        self._is_shared = is_shared
        kept = next((line for line in self.lines if line.must_end), next(iter(self.lines), None))
        return [line for line in self.lines if line is not kept] if is_shared else []

    def may_begin(self, now_s: float, line: Line, unsent: int = 0) -> bool:
        """Return whether a line may be sent to the replica, in addition to `unsent` lines without a replica yet."""
        count, alone_s, ends_s = len(self.lines) + unsent, now_s - self._since_s, _SPREAD * self._takes_s
        if self.waiting or (line.must_end and any(each.must_end for each in self.lines)):
            return False
        if not count:
            return True
        if (
            self._is_shared
            or count > _RISKED * self._saved
            or count >= min(self._most, 2.0 ** min(30.0, alone_s / _DOUBLES_S))
        ):
            return False
        is_long = alone_s > _LONG * self._takes_s > 0.0
        return is_long and not any(alone_s < pause_s < alone_s + ends_s for pause_s in self._pauses)

    def answered(self, took_s: float) -> None:
        """Count an answered line, and its duration."""
        self._takes_s += (took_s - self._takes_s) / (8.0 if self._takes_s else 1.0)
        self._saved = min(_MOST_SAVED * self._most, self._saved + _EARNS)

    def gave_up(self, line: Line) -> None:
        """Count a line that was given up."""
        line.given_up += 1
        self._saved -= 1.0


class ModelPlaces:
    """The places of the lines of one model in this process."""

    def __init__(self, gateway: Gateway, model: str, most_per_backend: int) -> None:
        self._gateway = gateway
        self._model = model
        self._shown = gateway.metrics.gauge("gateway_batch_lines_in_flight")
        self.at = defaultdict[str, Places](lambda: Places(most_per_backend, time.monotonic()))  # by backend
        self._changed = asyncio.Event()
        self.requests: dict[Line, LineRequest | None] = {}  # of all lines with a place

    async def wait(self) -> None:
        """Wait until there may be a place."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), WAIT_S)

    def closed_to(self, line: Line, closed: Collection[str]) -> tuple[str, ...] | None:
        """Return the backends without a place for a line, including `closed` ones; None if none has a place."""
        queue, now_s = self._gateway.relay.queues.get(self._model), time.monotonic()
        if queue is not None and queue.waiting:
            return None
        unsent = len(self.requests.keys() - {line}) - sum(len(places.lines) for places in self.at.values())
        names = [each.name for each in self._gateway.pool.up(self._model)]
        full = [name for name in names if name in closed or not self.at[name].may_begin(now_s, line, unsent)]
        return tuple(full) if len(full) < len(names) else None

    def sent(self, line: Line, backend: str) -> None:
        """Record the backend to which a line was sent, in place of an earlier one."""
        self._remove(line)
        self.at[backend].lines[line] = None
        self.at[backend].sent += 1

    def leave(self, line: Line) -> None:
        """Release the place of a line."""
        del self.requests[line]
        self._remove(line)
        self._changed.set()

    def _remove(self, line: Line) -> None:
        for places in self.at.values():
            places.lines.pop(line, None)

    def look(self) -> None:
        """See where there are requests of others, and give up the lines that disturb them."""
        members = {each.name for each in self._gateway.pool.of(self._model)}
        for left in [name for name, places in self.at.items() if name not in members and not places.lines]:
            del self.at[left]
        for backend in self._gateway.pool.up(self._model):
            places = self.at[backend.name]
            others, lines = backend.sent - places.sent, len(places.lines)
            is_shared = backend.in_flight > lines or backend.load.others > lines / 4  # reports lag
            has_come = places.others not in {None, others}
            places.others, places.waiting = others, backend.load.waiting
            for line in places.look(time.monotonic(), is_shared=is_shared, has_come=has_come):
                request = self.requests.get(line)
                if request is not None and request.give_up():
                    places.gave_up(line)
        self._shown.labels(self._model).set(len(self.requests))
        self._changed.set()
