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
"""Usage of the KV cache from which requests wait for room in it."""


@dataclass(frozen=True, slots=True)
class Minute:
    """Sums over the probes of about a minute."""

    requests: int = 0  # requests in the engine, running or waiting
    waiting_for_room: int = 0  # those that waited while the KV cache was nearly full
    waiting_for_a_place: int = 0  # those that waited although it was not: the batch was full

    @property
    def running(self) -> int:
        """Those in the batch."""
        return self.requests - self.waiting_for_room - self.waiting_for_a_place


class Occupancy:
    """Sums over probes, by minute, of the last three hours.

    Examples
    --------
    >>> occupancy = Occupancy()
    >>> for _ in range(30):
    ...     occupancy.add(EngineMetrics(running=16, waiting=4, kv_usage=0.3))
    >>> occupancy.minutes[0]
    Minute(requests=600, waiting_for_room=0, waiting_for_a_place=120)
    """

    def __init__(self) -> None:
        self.minutes: deque[Minute] = deque(maxlen=_MINUTES)
        self._probes = self._requests = self._room = self._place = 0

    def add(self, engine: EngineMetrics) -> None:
        """Add a reading."""
        self._probes += 1
        self._requests += engine.running + engine.waiting
        if engine.kv_usage >= _FULL:
            self._room += engine.waiting
        else:
            self._place += engine.waiting
        if self._probes >= PROBES:
            self.minutes.append(Minute(self._requests, self._room, self._place))
            self._probes = self._requests = self._room = self._place = 0
