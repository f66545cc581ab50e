"""Engines: what is known about one over the life of its process, and which ones answer at an address."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from backends.engine_metrics import AcceptanceOfLate, EngineMetrics, total
from backends.step_comparison import StepComparison

_GONE_S: Final = 300.0
"""Seconds without an answer after which a process is gone."""
_FALLS: Final = 3
_FALLS_S: Final = 30.0
"""No engine restarts this often within this many seconds."""
SEVERAL: Final = "several engines answer at this address; give each its own"


PROBES: Final = 30
"""Probes per minute, at one every two seconds."""
_MINUTES: Final = 180
_FULL: Final = 0.9
"""Usage of the KV cache or of the batch from which requests count as waiting for it."""


@dataclass(frozen=True, slots=True)
class ProbeMinute:
    """Sums over about a minute of probes."""

    requests: int = 0  # requests in the engine, running or waiting
    waiting_for_room: int = 0  # requests that waited while the KV cache was nearly full
    # Per probe with requests waiting although it was not: requests running in each engine, and requests waiting.
    others: tuple[tuple[int, int], ...] = ()

    def waiting_for_a_place(self, places: int) -> int:
        """Return the requests that waited while a batch of this size was nearly full; others had only just arrived."""
        return sum(waiting for running, waiting in self.others if running >= _FULL * places)


class Occupancy:
    """Sums over probes, by minute, for the last three hours.

    Examples
    --------
    >>> occupancy = Occupancy()
    >>> for _ in range(30):
    ...     occupancy.add(EngineMetrics(running=16, waiting=4, kv_usage=0.3))
    >>> occupancy.minutes[0].waiting_for_a_place(16), occupancy.minutes[0].waiting_for_a_place(256)
    (120, 0)
    """

    def __init__(self) -> None:
        self.minutes: deque[ProbeMinute] = deque(maxlen=_MINUTES)
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
            self.minutes.append(ProbeMinute(self._requests, self._room, tuple(self._others)))
            self._probes = self._requests = self._room = 0
            self._others = []


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine reports about itself besides its metrics, as last read."""

    card: Mapping[str, object] | None = None  # the model's entry in its `/v1/models`; None before the first reading
    context_tokens: int = 0  # longest context according to that entry; 0 if it does not say
    served: tuple[str, ...] = ()  # names of its models, without adapters
    adapters: frozenset[str] = frozenset()  # names of its loaded LoRA adapters
    version: str = ""  # of its vLLM; empty if it does not say
    tells_pause: bool = False  # whether it reports being paused, as it does in development mode

    @property
    def root(self) -> str:
        """Name or path of its loaded weights; empty if it does not say."""
        return str((self.card or {}).get("root") or "").rstrip("/")


@dataclass(slots=True)
class Engine:
    """One engine; a restart makes a new one, so that no fact outlives its engine."""

    said: Said = field(default_factory=Said)
    metrics: EngineMetrics | None = None  # from its last metrics page; None without one
    acceptance: AcceptanceOfLate = field(default_factory=AcceptanceOfLate)
    occupancy: Occupancy = field(default_factory=Occupancy)
    comparison: StepComparison = field(default_factory=StepComparison)
    contradictions: Mapping[str, str] = field(default_factory=dict)  # to the pool file, by kind
    habits: Any = None  # what the relay has learned about its streams


class Processes:
    """The processes behind the metrics pages of one address, by start time.

    Examples
    --------
    >>> processes, one, two = Processes(), EngineMetrics(started_s=1.0), EngineMetrics(started_s=2.0)
    >>> [processes.take(page, now_s=0.0)[1] for page in (one, two, one, two)], processes.are_several
    ([None, True, False, False], True)
    """

    def __init__(self) -> None:
        self.are_several = False
        self._pages: dict[float, tuple[EngineMetrics, float]] = {}  # the last page of each, and when it was read
        self._last: EngineMetrics | None = None
        self._falls: deque[float] = deque(maxlen=_FALLS)
        self._twins_s = -math.inf  # when two with the same start were last seen

    def take(self, page: EngineMetrics, now_s: float) -> tuple[EngineMetrics | None, bool | None]:
        """Return the counts of all processes that answer, and whether this page is from a new process.

        The first is None if the processes cannot be told apart, the second if the page does not tell.
        """
        last, self._last = self._last, page
        has_fallen = last is not None and (
            page.generation_tokens < last.generation_tokens or page.prompt_tokens < last.prompt_tokens
        )
        if not page.started_s:
            if has_fallen:
                self._falls.append(now_s)
            self.are_several = len(self._falls) == _FALLS and now_s - self._falls[0] < _FALLS_S
            return (None, False) if self.are_several else (page, has_fallen or None)
        is_other = last is not None and page.started_s != last.started_s
        if has_fallen and not is_other:  # a restart would change the start: two with one start, as from one script
            self._twins_s = now_s
        if now_s - self._twins_s < _GONE_S:
            self.are_several = True
            return None, False
        pages = self._pages = {start: each for start, each in self._pages.items() if now_s - each[1] < _GONE_S}
        was_several, returns = self.are_several, is_other and page.started_s in pages
        pages[page.started_s] = page, now_s
        self.are_several = returns or (was_several and len(pages) > 1)
        if self.are_several:
            return total([each for each, _ in pages.values()]), False
        return page, None if last is None or not last.started_s else is_other
