"""The queue of a model: requests wait here, in order of priority, while all of their backends are full.

Among requests of one priority, each client gets its fair share. The queue bounds what waits inside the engines, where a
request can no longer overtake others. Requests of a client, or of one of its tenants, that the same backends can serve
form a line. A line whose backends are full does not block the others.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, merge
from typing import Final

from backends.backend import Backend
from backends.health import State
from gateway.config.settings.queue import QueueSettings
from gateway.dialects.errors import GatewayError
from gateway.dialects.json_body import set_field
from gateway.relay.roles import Waiter
from gateway.relay.waiting.shares import LONG_PROMPT_S, Charge, FairShares, Party
from gateway.routing.keys import ANONYMOUS
from gateway.routing.model import Traffic

_now_s: Final = time.perf_counter  # as exchanges use
_LONGEST_RETRY_S = 60.0
_LARGEST: Final = 2**31 - 1
_SENT_TO: Final = frozenset({State.UP, State.RECOVERING})


@dataclass(slots=True, eq=False)
class Place:
    """The place of one request in the queue."""

    waiter: Waiter
    party: Party
    members: tuple[str, ...]  # names of the backends that can serve it
    order: tuple[int, int]  # its rank, and its number in order of arrival
    size_bytes: int
    since_s: float

    def __lt__(self, other: Place) -> bool:
        return self.order < other.order


class ModelQueue:
    """The queue of one model in this process."""

    def __init__(self, model: str, bounds: QueueSettings) -> None:
        self.model = model
        self.bounds = bounds  # this process's part of the queue's bounds
        # waiting, waiting_bytes: requests that wait, and the bytes of their bodies.
        self.waiting = 0
        self.waiting_bytes = 0
        # Requests that were refused, by reason: `full`, `evicted`, `timeout` or `deadline`.
        self.refused = dict.fromkeys(("full", "evicted", "timeout", "deadline"), 0)
        # By the backends that can serve the requests, then by client or tenant; each line is in order.
        self._lines: dict[tuple[str, ...], dict[Party, list[Place]]] = {}
        self._number = 0
        self._sent = Traffic()
        self.shares = FairShares()
        self._is_busy = False

    def free(self, candidates: Sequence[Backend]) -> list[Backend]:
        """Return the candidates with fewer requests than the bound."""
        bound = self.bounds.max_in_flight_per_backend
        return [backend for backend in candidates if backend.in_flight < bound]

    def body_for_engine(self, body: bytes, sent: object, rank: int) -> bytes:
        """Return the body of a request with the `priority` for the engine."""
        if self.bounds.pass_priority:
            return body if (0 if sent is None else sent) == rank else set_field(body, "priority", rank)
        return set_field(body, "priority", 0) if sent and isinstance(sent, int | float) else body

    def send_or_enter(self, waiter: Waiter, rank: int) -> Place | None:
        """Send a request if one of its backends has room; else add it to the queue and return its place."""
        members, client = waiter.members(), waiter.request.client
        party = self.shares.party(client.id, client.weight)
        if client.tenant_header:
            party = party.tenant(waiter.request.tenant)
        if free := self._free_for(waiter, party, len(members)):
            waiter.take_turn(0.0, free, _charge(waiter, party))
            return None
        return self._enter(waiter, party, members, rank)

    def _free_for(self, waiter: Waiter, party: Party, members: int) -> list[Backend]:
        """Return the backends to which a request may be sent now, if its client's share has room."""
        bound = self.bounds.max_in_flight_per_backend
        if not party.has_room(members * bound):
            return []
        try:
            for may_try in (True, False):  # a backend on trial, offered first, may be full
                candidates = waiter.candidates((), may_try=may_try)
                if free := self.free(candidates):
                    return self._within_share(waiter, party, candidates, free)
        except GatewayError:  # raised again where the client gets it
            pass
        return []

    def _within_share(
        self, waiter: Waiter, party: Party, candidates: list[Backend], free: list[Backend]
    ) -> list[Backend]:
        """Return the free backends on which the request's prompt may delay others."""
        if waiter.request.client is ANONYMOUS or len(candidates) == 1:
            return free
        price, bound = waiter.routed.price(), self.bounds.max_in_flight_per_backend
        if price.prefill_s <= LONG_PROMPT_S:
            return free
        return self.free(candidates[: party.backends_for(price, len(candidates), bound)])

    def _enter(self, waiter: Waiter, party: Party, members: Sequence[Backend], rank: int) -> Place:
        """Add a request to the queue; if it is full, evict the last requests of lower priority."""
        size_bytes = len(waiter.body)
        self._make_room(rank, size_bytes)
        self._number += 1
        names = tuple([backend.name for backend in members])
        place = Place(waiter, party, names, (rank, self._number), size_bytes, _now_s())
        insort(self._lines.setdefault(names, {}).setdefault(party, []), place)
        party.wait()
        self.waiting += 1
        self.waiting_bytes += size_bytes
        return place

    def leave(self, place: Place) -> bool:
        """Remove a request from the queue; return False if it has left already."""
        lines = self._lines.get(place.members, {})
        line = lines.get(place.party, [])
        at = bisect_left(line, place)
        if at == len(line) or line[at] is not place:
            return False
        del line[at]
        if not line:
            del lines[place.party]
        if not lines:
            del self._lines[place.members]
        place.party.leave()
        self.waiting -= 1
        self.waiting_bytes -= place.size_bytes
        return True

    def dispatch(self) -> None:
        """Send what can be sent. Called whenever a backend may take more, so that none stays idle."""
        if self._is_busy or not self.waiting:
            return
        self._is_busy = True
        try:
            while (found := self._next()) is not None:
                place, candidates = found
                waiter = place.waiter
                self.leave(place)
                now_s = _now_s()
                self._sent.arrive(now_s)
                waiter.take_turn(now_s - place.since_s, candidates, _charge(waiter, place.party))
        finally:
            self._is_busy = False

    def count_deadline(self) -> None:
        """Count a request whose deadline passed before its turn."""
        self.refused["deadline"] += 1

    def close(self) -> None:
        """Send nothing more; the caller ends the waiting requests."""
        self._is_busy = True

    def end_overdue(self, now_s: float) -> None:
        """End the requests that have waited too long; called about twice a second."""
        self.shares.age()
        for place in [place for line in self._each_line() for place in line]:
            if now_s - place.since_s < self.bounds.max_wait_s or not self.leave(place):
                continue  # the end of another may have made room, so that it was sent
            error = self.refusal("timeout", f"The request waited for {now_s - place.since_s:.0f} s for a backend.")
            try:
                place.waiter.candidates(())
            except GatewayError as none_up:
                error = none_up
            place.waiter.end_with_error(error)

    def refusal(self, reason: str, text: str) -> GatewayError:
        """Count a refusal and return its error, with the time to drain the queue as `Retry-After`."""
        self.refused[reason] += 1
        per_s = self._sent.qps(_now_s())
        retry_after_s = min(_LONGEST_RETRY_S, (self.waiting + 1) / per_s) if per_s > 0 else self.bounds.max_wait_s
        return GatewayError(
            503,
            f"{text} Try again in {max(1.0, retry_after_s):.0f} s.",
            code="queue_timeout" if reason == "timeout" else "queue_full",
            retry_after_s=retry_after_s,
        )

    def _next(self) -> tuple[Place, list[Backend]] | None:
        """Return the next place to serve among those whose backends may take more, with these backends."""
        firsts = [
            _turn(line[0])
            for lines in self._lines.values()
            if self._may_send(next(iter(lines.values()))[0].waiter)
            for line in lines.values()
        ]
        heapify(firsts)
        while firsts:
            first = heappop(firsts)[-1]
            if candidates := self._free_for(first.waiter, first.party, len(first.members)):
                return first, candidates
        return None

    def _may_send(self, waiter: Waiter) -> bool:
        """Return whether any backend that can serve a request may take more; if none can, skip its line."""
        try:
            members = waiter.members()
        except GatewayError:  # raised again where the client gets it
            return True
        return any(backend.health.state in _SENT_TO for backend in self.free(members))

    def _each_line(self) -> Iterator[list[Place]]:
        return (line for lines in self._lines.values() for line in lines.values())

    def _make_room(self, rank: int, size_bytes: int) -> None:
        """Evict the last requests of lower priority until there is room; none if that is not enough."""
        bounds, evicted = self.bounds, list[Place]()
        waiting, waiting_bytes = self.waiting, self.waiting_bytes
        if waiting < bounds.max_waiting and waiting_bytes + size_bytes <= bounds.max_waiting_bytes:
            return
        last_first = merge(*[reversed(line) for line in self._each_line()], reverse=True)
        for place in last_first:
            if place.order[0] <= rank:
                break
            evicted.append(place)
            waiting -= 1
            waiting_bytes -= place.size_bytes
            if waiting < bounds.max_waiting and waiting_bytes + size_bytes <= bounds.max_waiting_bytes:
                break
        if waiting >= bounds.max_waiting or waiting_bytes + size_bytes > bounds.max_waiting_bytes:
            text = f"The queue of {self.model} is full: {self.waiting} requests wait for a backend."
            raise self.refusal("full", text)
        for place in evicted:
            if self.leave(place):
                text = f"The queue of {self.model} is full, and a request of higher priority has come."
                place.waiter.end_with_error(self.refusal("evicted", text))


def _charge(waiter: Waiter, party: Party) -> Charge | None:
    """Charge the client of a request being sent, unless all requests are anonymous."""
    return None if waiter.request.client is ANONYMOUS else party.charge(waiter.routed.price())


def _turn(place: Place) -> tuple[int, float, float, int, Place]:
    """Return the sort key by which places are served."""
    party, (rank, number) = place.party, place.order
    client = party.parent
    return (
        (rank, party.served_s, 0.0, number, place)
        if client is None
        else (rank, client.served_s, party.served_s, number, place)
    )


def without_bound(bounds: QueueSettings) -> QueueSettings:
    """Return the bounds of a queue that a reload removed, while it drains."""
    return bounds.model_copy(update={"max_in_flight_per_backend": sys.maxsize})


def rank_of(key_priority: int, sent: object) -> int:
    """Return the rank of a request in the queue, by vLLM's convention: lower ones are served first, 0 is the default.

    A request can only lower its own priority relative to its key's: else all would claim the highest.

    Examples
    --------
    >>> rank_of(0, None), rank_of(0, 5), rank_of(10, -20), rank_of(-10, 3)
    (0, 5, 10, -7)
    """
    if isinstance(sent, bool) or not isinstance(sent, int | float) or not math.isfinite(sent):
        return key_priority
    return key_priority + int(min(max(sent, 0), _LARGEST - abs(key_priority)))
