"""Closed loops: a session sends a request its think time after the previous answer ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lab.simulation.request import ReplayRequest

LOOKAHEAD_S = 0.05
"""Most seconds that a replay of sessions advances at once; shorter think times may become this long."""


class Order(NamedTuple):
    """When requests are sent; arrays of shape (requests,)."""

    # Arrival time in seconds, ascending; counts for the first request of a session.
    arrived_s: npt.NDArray[np.float64]
    # Seconds from the end of the previous answer in its session; NaN for a request that does not wait for one: it keeps
    # its distance to the previous request in `arrived_s`.
    think_s: npt.NDArray[np.float64]
    sessions: Sequence[str | int]  # same for all requests of a session; empty or -1 for a request of its own

    @classmethod
    def of(cls, requests: Sequence[ReplayRequest]) -> Order:
        """Return the order of requests; a table has it without building them."""
        known = getattr(requests, "order", None)
        if isinstance(known, cls):
            return known
        arrived_s = np.array([one.arrived_s for one in requests])
        return cls(
            arrived_s,
            np.array([math.nan if one.think_s is None else one.think_s for one in requests]),
            [one.session for one in requests],
        )

    @property
    def is_open(self) -> bool:
        """Whether no request waits for an answer."""
        return bool(np.isnan(self.think_s).all())


class Agenda:
    """The requests still to send, with their times.

    Examples
    --------
    >>> order = Order(np.array([0.0, 1.0, 5.0]), np.array([math.nan, math.nan, 3.0]), ["a", "b", "a"])
    >>> agenda = Agenda(order)
    >>> list(agenda.due(10.0)), agenda.next_s, agenda.awaited
    ([(0.0, 0), (1.0, 1)], inf, {0})
    >>> agenda.ended(0, at_s=12.0, now_s=12.5)
    >>> list(agenda.due(20.0))
    [(15.0, 2)]
    """

    def __init__(self, order: Order) -> None:
        self._arrived_s, self._think_s = order.arrived_s.tolist(), order.think_s.tolist()
        self._following: dict[int, int] = {}
        self._coming: list[tuple[float, int]] = []  # ascending, so a heap
        last: dict[str | int, int] = {}
        for number, session in enumerate(order.sessions):
            if session not in {"", -1}:
                before = last.get(session)
                last[session] = number
                if before is not None:
                    self._following[before] = number
                    continue
            self._coming.append((self._arrived_s[number], number))
        self.awaited: set[int] = set()  # requests sent, for whose end another one waits

    @property
    def next_s(self) -> float:
        """Time of the next request; infinity if none is known."""
        return self._coming[0][0] if self._coming else math.inf

    def due(self, until_s: float) -> Iterator[tuple[float, int]]:
        """Remove and yield each request up to a time: its time and number."""
        while self.next_s <= until_s:
            at_s, number = heapq.heappop(self._coming)
            after = self._following.get(number)
            if after is None:
                pass
            elif math.isnan(self._think_s[after]):
                gap_s = max(0.0, self._arrived_s[after] - self._arrived_s[number])
                heapq.heappush(self._coming, (at_s + gap_s, after))
            else:
                self.awaited.add(number)
            yield at_s, number

    def ended(self, number: int, at_s: float, now_s: float) -> None:
        """Schedule the request that waited for the end of an answer, no earlier than now."""
        if number in self.awaited:
            self.awaited.remove(number)
            after = self._following[number]
            heapq.heappush(self._coming, (max(now_s, at_s + self._think_s[after]), after))
