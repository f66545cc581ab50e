"""How full an engine is over time: what its requests wait for, from probe to probe."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from backends.engine_metrics import EngineMetrics

PROBES: Final = 30
"""Probes of a minute, at one every two seconds."""
_MINUTES: Final = 180
_FULL: Final = 0.9
"""Usage of the KV cache, or of the places of the batch, from which requests wait for it."""


@dataclass(frozen=True, slots=True)
class Minute:
    """Sums over the probes of about a minute."""

    requests: int = 0  # requests in the engine, running or waiting
    waiting_for_room: int = 0  # those that waited while the KV cache was nearly full
    # Of the probes in which some waited although it was not: requests that ran in each engine, and that waited.
    others: tuple[tuple[int, int], ...] = ()

    def waiting_for_a_place(self, places: int) -> int:
        """Return those that waited while a batch of so many places was nearly full; others had only just come."""
        return sum(waiting for running, waiting in self.others if running >= _FULL * places)


class Occupancy:
    """Sums over probes, by minute, of the last three hours.

    Examples
    --------
    >>> occupancy = Occupancy()
    >>> for _ in range(30):
    ...     occupancy.add(EngineMetrics(running=16, waiting=4, kv_usage=0.3))
    >>> occupancy.minutes[0].waiting_for_a_place(16), occupancy.minutes[0].waiting_for_a_place(256)
    (120, 0)
    """

    def __init__(self) -> None:
        self.minutes: deque[Minute] = deque(maxlen=_MINUTES)
        self._probes = self._requests = self._room = 0
        self._others: list[tuple[int, int]] = []

    def add(self, engine: EngineMetrics) -> None:
        """Add a reading."""
        self._probes += 1
        self._requests += engine.running + engine.waiting
        if engine.kv_usage >= _FULL:
            self._room += engine.waiting
        elif engine.waiting:
            self._others.append((engine.running // engine.engines, engine.waiting))
        if self._probes >= PROBES:
            self.minutes.append(Minute(self._requests, self._room, tuple(self._others)))
            self._probes = self._requests = self._room = 0
            self._others = []
