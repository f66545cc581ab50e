"""Compares the tokens per step that an engine's answers show with those that it counts."""

from __future__ import annotations

import math
from collections import deque
from statistics import stdev
from typing import Final, NamedTuple

from backends.engine_metrics import EngineMetrics

_WINDOW_S: Final = 20.0
_WINDOW_TOKENS: Final = 2000
"""Least seconds and tokens of a window, so that answers across its bounds matter little."""
_LEAST_WINDOWS, _MOST_WINDOWS = 8, 30
_STUDENT: Final = 5.41
"""The 0.9995 quantile of Student's distribution with 7 degrees of freedom; conservative with more windows."""
_LEAST: Final = 0.02
"""Least difference of the logarithms: first beyond noise, later as measured."""


class Counts(NamedTuple):
    """Tokens and the steps that gave them, counted once per sequence: by the engine, and by answers."""

    tokens: float
    steps: float
    answered_tokens: float
    answered_steps: float

    def since(self, before: Counts) -> Counts:
        """Return what was added."""
        return Counts(*[now - then for now, then in zip(self, before, strict=True)])


class Difference(NamedTuple):
    """A difference beyond noise."""

    # shown, counted: tokens per step as the answers show, and as the engine counted for them.
    shown: float
    counted: float

    def __str__(self) -> str:
        """Return it in words."""
        return f"its answers show {self.shown:.2f} tokens per step where its engine counts {self.counted:.2f}"


class StepComparison:
    """The comparison of one engine.

    It reads both values in windows. An engine also serves other clients, and answers that do not show their steps: each
    of those tokens took between 1 / `most_per_step` and one step. What the engine counted for the answers seen thus
    lies between two bounds, which coincide without other tokens. A value beyond these bounds is a difference if it
    exceeds the noise between windows.

    Examples
    --------
    >>> comparison = StepComparison()
    >>> for number in range(9):
    ...     engine = EngineMetrics(generation_tokens=3000 * number, later_steps=1500 * number)
    ...     answered = 3000 * number, 1000 * number
    ...     is_new = comparison.add(engine, answered, most_per_step=4, now_s=20.0 * number)
    >>> str(comparison.difference)
    'its answers show 3.00 tokens per step where its engine counts 2.00'
    """

    def __init__(self) -> None:
        self.difference: Difference | None = None  # the current one; None if there is none
        self._windows: deque[Counts] = deque(maxlen=_MOST_WINDOWS)
        self._before: Counts | None = None
        self._began_s = 0.0

    def restart(self) -> None:
        """Start over, as for a new engine."""
        self.difference, self._before = None, None
        self._windows.clear()

    def add(self, engine: EngineMetrics, answered: tuple[float, float], most_per_step: int, now_s: float) -> bool:
        """Add a reading; return whether `difference` was recomputed."""
        if engine.steps is None:
            return False
        now = Counts(engine.generation_tokens, engine.steps, *answered)
        if self._before is None or now.tokens < self._before.tokens:
            had_one = self.difference is not None
            self.restart()
            self._before, self._began_s = now, now_s
            return had_one
        window = now.since(self._before)
        if now_s - self._began_s < _WINDOW_S or window.tokens < _WINDOW_TOKENS:
            return False
        self._before, self._began_s = now, now_s
        if window.steps <= 0 or min(window.answered_tokens, window.answered_steps) <= 0:
            return False
        self._windows.append(window)
        self.difference = self._compare(most_per_step)
        return True

    def figures(self, most_per_step: int) -> dict[str, float] | None:
        """Return tokens per step as shown, the bounds of those counted, and the share of others; None at first."""
        if not self._windows:
            return None
        total = self._total()
        low, high = _bounds(total, most_per_step)
        others = max(0.0, 1.0 - total.answered_tokens / total.tokens)
        shown = total.answered_tokens / total.answered_steps
        return {"shown": shown, "counted_at_least": low, "counted_at_most": high, "share_of_others": others}

    def _total(self) -> Counts:
        return Counts(*[sum(column) for column in zip(*self._windows, strict=True)])

    def _compare(self, most_per_step: int) -> Difference | None:
        count = len(self._windows)
        if count < _LEAST_WINDOWS:
            return None
        total = self._total()
        low, high = _bounds(total, most_per_step)
        shown = total.answered_tokens / total.answered_steps
        logs = [
            math.log(each.answered_tokens / each.answered_steps * each.steps / each.tokens) for each in self._windows
        ]
        margin = _LEAST + (_STUDENT * stdev(logs) / math.sqrt(count) if self.difference is None else 0.0)
        counted = min(max(shown, low), high)
        return Difference(shown, counted) if abs(math.log(shown / counted)) > margin else None


def _bounds(total: Counts, most_per_step: int) -> tuple[float, float]:
    """Return the bounds of the tokens per step that an engine counted for the answers that showed theirs."""
    others = max(0.0, total.tokens - total.answered_tokens)
    seen = total.tokens - others
    most = min(seen, total.steps - others / most_per_step)
    fewest = max(seen / most_per_step, total.steps - others)
    return seen / max(most, fewest), seen / fewest
