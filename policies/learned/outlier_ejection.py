"""Backends that behave unlike their method: taken out for a while, and tried again."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from backends.backend import Candidate

log = logging.getLogger(__name__)

SLOW_RATIO: Final = 3.0
"""Steps that take so many times what the fit expects at that load: 232 tokens/s fell to 24-157 in one report."""

POOR_RATIO: Final = 0.6
"""Share of the expected tokens per step: a head that does not fit was accepted at 21% for 85%, with k=3 39% of them."""

USUAL_SPREAD: Final = 0.25
"""Standard deviation of the logarithm of tokens per step over those expected, where it is not known; and the least."""

EVIDENCE: Final = 11.5
"""Logarithm of the odds from which a backend is out: healthy ones come so far less than once in 100,000 requests."""

FIRST_S: Final = 20.0
LONGEST_S: Final = 600.0
FADES_S: Final = 10.0
"""Half-life of slowness that nothing has confirmed since."""

_MOST_EVIDENCE: Final = 2.0
"""Of one request: at least six have to agree, however far off they are."""

_STEP_SPREAD: Final = 0.35
"""Of the logarithm of step times; in healthy replicas it is 0.02 to 0.04, but stalls come in clusters."""

_KEEP: Final = 0.8
"""Per observation, for the mean: about the last five requests decide."""
_LEAST: Final = 6.0
_SLOWNESS_FROM: Final = 1.3


class _Drift:
    """Whether the logarithm of a ratio is nearer to a fault than to health: Page's cumulative sum.

    Each request adds the logarithm of its odds under normal laws around `faulty` and `healthy`; the sum never falls
    below zero. Under the healthy law the odds of a request are 1 on average, so that within n of them the sum reaches h
    with a probability of at most n exp(-h): Lorden, "Procedures for Reacting to a Change in Distribution", Annals of
    Mathematical Statistics 42(6), 1971. Bounding what a request adds only lessens it.

    Parameters
    ----------
    healthy, faulty
        Means of the logarithm; halfway between them neither is nearer.
    """

    __slots__ = ("count", "evidence", "faulty", "healthy", "total")

    def __init__(
        self, healthy: float, faulty: float, evidence: float = 0.0, count: float = 0.0, total: float = 0.0
    ) -> None:
        self.healthy = healthy
        self.faulty = faulty
        self.evidence = evidence
        self.count = count
        self.total = total

    def add(self, ratio: float, spread: float) -> None:
        """Take in a ratio whose logarithm has this standard deviation."""
        # Bounded, so that a single request does not decide about the mean either.
        log_ratio = max(-2.0, min(2.0, math.log(ratio)))
        self.count = _KEEP * self.count + 1.0
        self.total = _KEEP * self.total + log_ratio
        odds = (self.faulty - self.healthy) * (log_ratio - (self.faulty + self.healthy) / 2) / spread**2
        self.evidence = max(0.0, self.evidence + min(_MOST_EVIDENCE, odds))

    def copy(self) -> _Drift:
        """Return one that has seen the same."""
        return _Drift(self.healthy, self.faulty, self.evidence, self.count, self.total)

    def reset(self) -> None:
        """Forget everything."""
        self.evidence = self.count = self.total = 0.0

    @property
    def mean(self) -> float:
        """The ratio of late, as a geometric mean."""
        return math.exp(self.total / self.count) if self.count else 1.0

    @property
    def is_well(self) -> bool:
        """Whether enough was seen, and nothing speaks of a fault."""
        return self.evidence == 0.0 and self.count * (1 - _KEEP) > 1 - _KEEP**_LEAST


def _around(ratio: float, healthy: float) -> _Drift:
    """Return a drift that tells ratios beyond `ratio` from those at `healthy`."""
    return _Drift(math.log(healthy), 2 * math.log(ratio) - math.log(healthy))


class _Record:
    """What is known of one backend."""

    __slots__ = ("next_s", "out", "out_until_s", "seen_s", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = _around(SLOW_RATIO, 2.0)
        self.tokens = _around(POOR_RATIO, 0.85)
        self.seen_s = self.out_until_s = 0.0
        self.next_s = FIRST_S
        self.out = False

    def copy(self) -> _Record:
        other = _Record()
        other.steps, other.tokens = self.steps.copy(), self.tokens.copy()
        other.seen_s, other.out_until_s, other.next_s, other.out = self.seen_s, self.out_until_s, self.next_s, self.out
        return other

    def forget(self) -> None:
        self.steps.reset()
        self.tokens.reset()


class OutlierEjection:
    """Watches how far each backend is from what was expected of it.

    Its own fit would come to know a slow backend too, in time; but while it learns, requests would pay.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self.reasons: dict[str, str] = {}
        """Of those that are out now, by name."""

    def dry_run_copy(self) -> OutlierEjection:
        """Return a copy; who is let in again there is not let in here."""
        other = OutlierEjection()
        other._records = {name: record.copy() for name, record in self._records.items()}
        other.reasons = dict(self.reasons)
        return other

    def admit(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        """Return the candidates that are not in quarantine; all, if none would be left."""
        if not self.reasons:
            return candidates
        for name in [*self.reasons]:
            record = self._records[name]
            if record.out_until_s <= now_s:
                del self.reasons[name]
                record.forget()  # what was still under way there says nothing of now
                log.warning("%s is tried again after its quarantine", name)
        return [candidate for candidate in candidates if candidate.name not in self.reasons] or candidates

    def observe(
        self,
        backend: str,
        step_ratio: float | None,
        acceptance_ratio: float | None,
        now_s: float,
        acceptance_spread: float = USUAL_SPREAD,
    ) -> float:
        """Compare a request with what was expected of it, and return how slow the backend is, see `slowness`.

        Parameters
        ----------
        step_ratio
            Its seconds per step over those expected; None if not known.
        acceptance_ratio
            Its tokens per step over those expected; None if not known.
        acceptance_spread
            Standard deviation of the latter's logarithm between requests that are alike.
        """
        record = self._records.get(backend)
        if record is None:
            record = self._records[backend] = _Record()
        record.seen_s = now_s
        if step_ratio:
            record.steps.add(step_ratio, _STEP_SPREAD)
        if acceptance_ratio:
            record.tokens.add(acceptance_ratio, max(USUAL_SPREAD, acceptance_spread))
        if backend not in self.reasons:
            if record.steps.evidence >= EVIDENCE:
                reason = f"steps take {record.steps.mean:.1f} times as long as expected"
                self._put_out(backend, record, reason, now_s)
            elif record.tokens.evidence >= EVIDENCE:
                reason = f"tokens per step are {record.tokens.mean:.0%} of those expected"
                self._put_out(backend, record, reason, now_s)
            elif record.out and record.steps.is_well and (record.tokens.is_well or not record.tokens.count):
                record.out, record.next_s = False, FIRST_S
        return self.slowness(backend, now_s)

    def slowness(self, backend: str, now_s: float) -> float:
        """Return how many times as long as expected the steps of a backend take just now, at least 1.

        What no request has confirmed fades. One that is out is not told to be slow: when it is back it must be tried,
        or nothing would tell that it is well.
        """
        record = self._records.get(backend)
        if record is None or backend in self.reasons or record.steps.count <= 2:
            return 1.0
        mean = record.steps.mean
        if mean <= _SLOWNESS_FROM:
            return 1.0
        return 1.0 + (mean - 1.0) * math.exp2(-max(0.0, now_s - record.seen_s) / FADES_S)

    def _put_out(self, backend: str, record: _Record, reason: str, now_s: float) -> None:
        record.out, record.out_until_s = True, now_s + record.next_s
        record.next_s = min(LONGEST_S, 2 * record.next_s)
        record.forget()
        self.reasons[backend] = reason
        log.warning("%s is in quarantine for %.0f s: %s", backend, record.out_until_s - now_s, reason)
