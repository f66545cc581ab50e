"""Backends that behave unlike their method: taken out for a while, and tried again."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from backends.backend import Candidate

log = logging.getLogger(__name__)

SLOW_RATIO = 3.0
"""Steps that take so many times what the fit expects at that load: 232 tokens/s fell to 24-157 in one report."""

POOR_RATIO = 0.5
"""Share of the expected tokens per step: an EAGLE head that does not fit its target was accepted at 21% for 85%."""

FIRST_S = 20.0
LONGEST_S = 600.0

_KEEP = 0.8
"""Per observation: about the last five requests decide."""
_LEAST = 6.0
_SLOWNESS_FROM = 1.3


@dataclass(slots=True)
class _Record:
    count: float = 0.0
    slow: float = 0.0
    poor: float = 0.0
    out_until_s: float = 0.0
    next_s: float = FIRST_S
    out: bool = False


class Quarantine:
    """Watches how far each backend is from what was expected of it.

    Its own fit would come to know a slow backend too, in time; but while it learns, requests would pay.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self.reasons: dict[str, str] = {}
        """Of those that are out now, by name."""

    def admit(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        """Return the candidates that are not in quarantine; all, if none would be left."""
        if not self.reasons:
            return candidates
        for name in [*self.reasons]:
            record = self._records[name]
            if record.out_until_s <= now_s:
                del self.reasons[name]
                record.count = record.slow = record.poor = 0.0  # what was still under way there says nothing of now
                log.warning("%s is tried again after its quarantine", name)
        return [candidate for candidate in candidates if candidate.name not in self.reasons] or candidates

    def observe(self, backend: str, step_ratio: float | None, acceptance_ratio: float | None, now_s: float) -> float:
        """Compare a request with what was expected of it, and return how slow the backend is just now, at least 1.

        One that is out is not told to be slow: when it is back it must be tried, or nothing would tell that it is well.

        Parameters
        ----------
        step_ratio
            Its seconds per step over those expected; None if not known.
        acceptance_ratio
            Its tokens per step over those expected; None if not known.
        """
        record = self._records.setdefault(backend, _Record())
        record.count = _KEEP * record.count + 1.0
        record.slow = _KEEP * record.slow + (_bounded_log(step_ratio) if step_ratio else 0.0)
        record.poor = _KEEP * record.poor + (_bounded_log(acceptance_ratio) if acceptance_ratio else 0.0)
        slowness = math.exp(record.slow / record.count)
        if record.count * (1 - _KEEP) > 1 - _KEEP**_LEAST and backend not in self.reasons:
            if slowness > SLOW_RATIO:
                self._put_out(backend, record, f"steps take {slowness:.1f} times as long as expected", now_s)
            elif (share := math.exp(record.poor / record.count)) < POOR_RATIO:
                self._put_out(backend, record, f"tokens per step are {share:.0%} of those expected", now_s)
            elif record.out and slowness < _SLOWNESS_FROM and share > 2 * POOR_RATIO / (1 + POOR_RATIO):
                record.out, record.next_s = False, FIRST_S
        return slowness if slowness > _SLOWNESS_FROM and record.count > 2 and backend not in self.reasons else 1.0

    def _put_out(self, backend: str, record: _Record, reason: str, now_s: float) -> None:
        record.out, record.out_until_s = True, now_s + record.next_s
        record.next_s = min(LONGEST_S, 2 * record.next_s)
        record.count = record.slow = record.poor = 0.0
        self.reasons[backend] = reason
        log.warning("%s is in quarantine for %.0f s: %s", backend, record.out_until_s - now_s, reason)


def _bounded_log(ratio: float) -> float:
    """Return the logarithm of a ratio, bounded so that a single request cannot put a backend out."""
    return max(-2.0, min(2.0, math.log(ratio)))
