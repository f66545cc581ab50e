"""What speculation gives an engine's requests, by its own counters, which include requests of other clients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from backends.engine_metrics import EngineMetrics

WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What an engine counted between two readings.

    Examples
    --------
    >>> before = EngineMetrics(generation_tokens=400, drafts=100, draft_tokens=300, accepted_tokens=150)
    >>> now = EngineMetrics(generation_tokens=1000, drafts=200, draft_tokens=600, accepted_tokens=350)
    >>> found = Acceptance.between(before, now)
    >>> found.tokens_per_step, round(found.rate, 3)
    (1.5, 0.667)
    """

    tokens_per_step: float  # output tokens per engine step of a request, steps that drafted nothing included
    rate: float | None  # accepted over drafted tokens; None if nothing was drafted
    by_position: tuple[float, ...]  # share of the drafts that were accepted at least up to each position, shape (k,)

    @classmethod
    def between(cls, before: EngineMetrics | None, now: EngineMetrics | None) -> Acceptance | None:
        """Return the acceptance between two readings; None if there was no output, or the engine does not count it.

        Engines that do not count their steps are known by their tokens: a step gives those accepted, and one. The last
        step of an answer may accept more than the answer still needs.
        """
        if before is None or now is None or (tokens := now.generation_tokens - before.generation_tokens) <= 0:
            return None
        drafts = now.drafts - before.drafts
        drafted, accepted = now.draft_tokens - before.draft_tokens, now.accepted_tokens - before.accepted_tokens
        steps = tokens - accepted
        if now.steps is not None and before.steps is not None:
            steps = now.steps - before.steps
        earlier = (*before.accepted_per_position, *[0] * len(now.accepted_per_position))
        positions = zip(now.accepted_per_position, earlier, strict=False)
        return cls(
            tokens / max(1, steps, drafts),
            accepted / drafted if drafted else None,
            tuple((after - then) / drafts for after, then in positions) if drafts else (),
        )


class AcceptanceOfLate:
    """The acceptance of an engine over the last minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, EngineMetrics]] = deque()

    def add(self, engine: EngineMetrics, now_s: float) -> None:
        """Add a reading."""
        readings = self._readings
        while len(readings) > 1 and readings[0][0] < now_s - WINDOW_S:
            readings.popleft()
        readings.append((now_s, engine))

    def at(self, now_s: float) -> Acceptance | None:
        """Return the acceptance of the minute before a time; None if the engine gave no output in it."""
        if not self._readings or self._readings[-1][0] < now_s - WINDOW_S:
            return None
        return Acceptance.between(self._readings[0][1], self._readings[-1][1])
