"""The queue of a model: requests wait here, in order of priority, while each of their backends has enough of them.

It bounds what waits in the engines, where a request of higher priority that comes later can no longer be served first.
Requests that the same backends can serve form a line. A line whose backends are full holds up no other.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from backends.backend import Backend
from gateway.dialects.errors import GatewayError
from gateway.dialects.json_body import set_field
from gateway.routing.model import Traffic

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

_LONGEST_RETRY_S = 60.0
_LARGEST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What a queue may hold."""

    in_flight_per_backend: int  # requests in flight at a backend from which on further ones wait
    # waiting, waiting_bytes: most requests that wait, and most bytes of their bodies.
    waiting: int
    waiting_bytes: int
    wait_s: float  # longest wait, in seconds
    # Whether engines get the rank of a request as its `priority`, or 0 if the request sets any.
    passes_priority: bool = False


UNBOUNDED: Final = QueueBounds(sys.maxsize, sys.maxsize, sys.maxsize, math.inf)


class Place:
    """The place of one request in the queue."""

    __slots__ = ("_order", "line", "rank", "since_s", "size_bytes", "waiter")

    def __init__(self, waiter: Exchange, line: _Line, rank: int, number: int, size_bytes: int, since_s: float) -> None:
        self.waiter: Exchange | None = waiter  # None once the place is given up
        self.line = line
        self.rank = rank
        self.size_bytes = size_bytes
        self.since_s = since_s
        self._order = (rank, number)

    def __lt__(self, other: Place) -> bool:
        return self._order < other._order


class _LastFirst:
    """A place in a heap whose first element is the last to be served."""

    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place

    def __lt__(self, other: _LastFirst) -> bool:
        return other.place < self.place


class _Line:
    """Requests that the same backends can serve."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: list[Place] = []  # a heap, with places that were given up

    def head(self) -> Place | None:
        """Return the place that is served first; None if the line is empty."""
        while self.places and self.places[0].waiter is None:
            heappop(self.places)
        return self.places[0] if self.places else None


class ModelQueue:
    """The queue of one model in this process."""

    def __init__(self, model: str, bounds: QueueBounds, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model = model
        self.bounds = bounds
        # waiting, waiting_bytes: requests that wait, and the bytes of their bodies.
        self.waiting = 0
        self.waiting_bytes = 0
        # Requests that were refused, by reason: `full`, `evicted`, `timeout` or `deadline`.
        self.refused = dict.fromkeys(("full", "evicted", "timeout", "deadline"), 0)
        self._clock = clock  # returns seconds, as `time.perf_counter`, by which exchanges measure
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._last: list[_LastFirst] = []  # a heap, with places that were given up
        self._number = 0
        self._sent = Traffic()
        self._is_busy = False

    def free(self, candidates: Sequence[Backend]) -> list[Backend]:
        """Return the candidates with fewer requests than the bound."""
        bound = self.bounds.in_flight_per_backend
        return [backend for backend in candidates if backend.in_flight < bound]

    def body_for_engine(self, body: bytes, sent: object, rank: int) -> bytes:
        """Return the body of a request with the `priority` that an engine gets."""
        if self.bounds.passes_priority:
            return body if (0 if sent is None else sent) == rank else set_field(body, "priority", rank)
        return set_field(body, "priority", 0) if sent and isinstance(sent, int | float) else body

    def send_or_enter(self, waiter: Exchange, members: Sequence[Backend], rank: int, size_bytes: int) -> None:
        """Send a request if one of its backends has few enough; else add it to the queue."""
        if free := self._free_for(waiter):
            waiter.send(free)
        else:
            waiter.place = self.enter(waiter, members, rank, size_bytes)

    def _free_for(self, waiter: Exchange) -> list[Backend]:
        """Return the backends that a request may be sent to now."""
        try:
            # The backend on trial, which comes first, may be full.
            return self.free(waiter.candidates(())) or self.free(waiter.candidates((), may_try=False))
        except GatewayError:  # raised again where the client is told
            return []

    def enter(self, waiter: Exchange, members: Sequence[Backend], rank: int, size_bytes: int) -> Place:
        """Add a request to the queue; if it is full, the last request of a lower rank gives up its place."""
        self._make_room(rank, size_bytes)
        names = tuple([backend.name for backend in members])
        line = self._lines.get(names)
        if line is None:
            line = self._lines[names] = _Line()
        self._number += 1
        place = Place(waiter, line, rank, self._number, size_bytes, self._clock())
        heappush(line.places, place)
        heappush(self._last, _LastFirst(place))
        self.waiting += 1
        self.waiting_bytes += size_bytes
        return place

    def leave(self, place: Place) -> None:
        """Remove a request from the queue, unless it has left already."""
        if place.waiter is None:
            return
        place.waiter = None
        self.waiting -= 1
        self.waiting_bytes -= place.size_bytes
        if len(self._last) > 2 * self.waiting + 64:  # most of what the heaps hold is given up
            self._last = [each for each in self._last if each.place.waiter is not None]
            heapify(self._last)
            for line in self._lines.values():
                line.places = [each for each in line.places if each.waiter is not None]
                heapify(line.places)
            self._lines = {names: line for names, line in self._lines.items() if line.places}

    def dispatch(self) -> None:
        """Send what can be sent. Called whenever a backend may take more, so that nothing waits for a free one."""
        if self._is_busy or not self.waiting:
            return
        self._is_busy = True
        try:
            while (found := self._next()) is not None:
                place, candidates = found
                waiter = place.waiter
                assert waiter is not None
                self.leave(place)
                now_s = self._clock()
                self._sent.arrive(now_s)
                waiter.place = None
                waited_s = waiter.delivery.times.waited_s = now_s - place.since_s
                waiter.relay.metrics.queue_wait.labels(self.model).observe(waited_s)
                try:
                    waiter.send(candidates)
                except Exception:  # noqa: BLE001 -- a defect of the gateway, which must be answered too
                    waiter.end_with_error(waiter.defect())
        finally:
            self._is_busy = False

    def close(self) -> None:
        """Send nothing more; the requests that wait are ended by others."""
        self._is_busy = True

    def end_overdue(self, now_s: float) -> None:
        """End the requests that have waited for as long as they may."""
        overdue = [place for line in self._lines.values() for place in line.places if self._is_overdue(place, now_s)]
        for place in overdue:
            waiter = place.waiter
            if waiter is None:
                continue
            error = self.refusal("timeout", f"The request waited for {now_s - place.since_s:.0f} s for a backend.")
            try:
                waiter.candidates(())
            except GatewayError as none_up:
                error = none_up
            waiter.end_with_error(error)

    def _is_overdue(self, place: Place, now_s: float) -> bool:
        return place.waiter is not None and now_s - place.since_s >= self.bounds.wait_s

    def refusal(self, reason: str, text: str) -> GatewayError:
        """Count a refusal and return its error, with the time in which the queue empties as `Retry-After`."""
        self.refused[reason] += 1
        per_s = self._sent.qps(self._clock())
        retry_after_s = min(_LONGEST_RETRY_S, (self.waiting + 1) / per_s) if per_s > 0 else self.bounds.wait_s
        return GatewayError(
            503,
            f"{text} Try again in {max(1.0, retry_after_s):.0f} s.",
            code="queue_timeout" if reason == "timeout" else "queue_full",
            retry_after_s=retry_after_s,
        )

    def _next(self) -> tuple[Place, list[Backend]] | None:
        """Return the place that is served first among those whose backends may take more, with these backends."""
        heads = [head for line in self._lines.values() if (head := line.head()) is not None]
        heads.sort()
        for head in heads:
            assert head.waiter is not None
            if candidates := self._free_for(head.waiter):
                return head, candidates
        return None

    def _make_room(self, rank: int, size_bytes: int) -> None:
        bounds = self.bounds
        evicted: list[Place] = []
        waiting, waiting_bytes = self.waiting, self.waiting_bytes
        while waiting >= bounds.waiting or waiting_bytes + size_bytes > bounds.waiting_bytes:
            while self._last and self._last[0].place.waiter is None:
                heappop(self._last)
            if not self._last or self._last[0].place.rank <= rank:
                for place in evicted:
                    heappush(self._last, _LastFirst(place))
                raise self.refusal(
                    "full", f"The queue of {self.model} is full: {self.waiting} requests wait for a backend."
                )
            place = heappop(self._last).place
            evicted.append(place)
            waiting -= 1
            waiting_bytes -= place.size_bytes
        for place in evicted:
            waiter = place.waiter
            self.leave(place)
            if waiter is not None:
                text = f"The queue of {self.model} is full, and a request of higher priority has come."
                waiter.end_with_error(self.refusal("evicted", text))


def rank_of(key_priority: int, sent: object) -> int:
    """Return the rank of a request in the queue, by vLLM's convention: lower ones are served first, 0 is the default.

    A request can only lower its rank below that of its key: else all would claim the highest.

    Examples
    --------
    >>> rank_of(0, None), rank_of(0, 5), rank_of(10, -20), rank_of(-10, 3)
    (0, 5, 10, -7)
    """
    if isinstance(sent, bool) or not isinstance(sent, int | float) or not math.isfinite(sent):
        return key_priority
    return key_priority + int(min(max(sent, 0), _LARGEST - abs(key_priority)))
