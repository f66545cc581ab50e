"""Outlier ejection: backends that perform far worse than predicted are taken out of use for a while."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from backends.backend import Candidate
from policies.features.request import ANY_REQUEST, RequestFeatures
from policies.guarded.evidence import EVIDENCE, UNCOUNTED, Drafts, Evidence, Sources

log = logging.getLogger(__name__)

SLOW_RATIO: Final = 3.0
"""Observed over predicted step time of a faulty backend; in one report, 232 tokens/s fell to 24-157."""

POOR_RATIO: Final = 0.6
"""Observed over predicted tokens per step of a faulty backend; a mismatched head (21% accepted instead of 85%, k=3)
reaches 0.39."""

DEFAULT_SPREAD: Final = 0.25
"""Default and minimum standard deviation of log(observed / predicted tokens per step)."""

FIRST_S: Final = 20.0
"""Seconds of a first ejection; each relapse doubles it."""
LONGEST_S: Final = 600.0
"""Seconds of the longest ejection."""
SLOWNESS_HALF_LIFE_S: Final = 10.0
"""Half-life of a measured slowness that no later request confirms."""

_MAX_EVIDENCE: Final = 2.0
"""Maximum evidence from one request, so that ejection takes at least six."""

_STEP_SPREAD: Final = 0.35
"""Standard deviation assumed for log step time; healthy replicas have 0.02 to 0.04, but stalls come in clusters."""

_KEEP: Final = 0.8
"""Decay of the mean per observation; about the last five requests count."""
_MIN_COUNT: Final = 6.0
_MIN_SLOWNESS: Final = 1.3


class _Drift:
    """A test whether the mean of a log ratio has moved from `healthy` to `faulty`.

    Each request adds its log-likelihood ratio between normal distributions around the two means. For a healthy backend
    the likelihood ratio of a request is 1 on average, so the sum reaches h within n requests with a probability of at
    most n exp(-h), see `Evidence`. Capping the contribution of a request only lowers that.
    """

    __slots__ = ("count", "evidence", "faulty", "healthy", "total")

    def __init__(self, threshold: float, healthy: float) -> None:
        """Start a test in which ratios beyond `threshold` are evidence of a fault, given the ratio of health."""
        self.healthy = math.log(healthy)
        self.faulty = 2 * math.log(threshold) - self.healthy
        self.evidence = Evidence()
        self.count = self.total = 0.0

    def add(
        self,
        ratio: float,
        spread: float,
        request: RequestFeatures,
        alone: tuple[bool, bool],
        drafts: Drafts = UNCOUNTED,
    ) -> None:
        """Add a ratio whose logarithm has the standard deviation `spread`, see `Evidence.add`."""
        log_ratio = max(-2.0, min(2.0, math.log(ratio)))  # so that a single request cannot dominate the mean
        self.count = _KEEP * self.count + 1.0
        self.total = _KEEP * self.total + log_ratio
        log_likelihood = (self.faulty - self.healthy) * (log_ratio - (self.faulty + self.healthy) / 2) / spread**2
        self.evidence.add(min(_MAX_EVIDENCE, log_likelihood), request, alone, drafts)

    def reset(self) -> None:
        """Discard all observations."""
        self.evidence.reset()
        self.count = self.total = 0.0

    @property
    def mean(self) -> float:
        """Geometric mean of the latest ratios."""
        return math.exp(self.total / self.count) if self.count else 1.0

    @property
    def is_healthy(self) -> bool:
        """Whether there are enough observations and no evidence of a fault."""
        return self.evidence.total == 0.0 and self.count * (1 - _KEEP) > 1 - _KEEP**_MIN_COUNT


class _Record:
    """Observations and ejections of one backend."""

    __slots__ = ("client", "next_s", "out_until_s", "seen_s", "steps", "tokens", "was_out")

    def __init__(self) -> None:
        self.steps = _Drift(SLOW_RATIO, 2.0)
        self.tokens = _Drift(POOR_RATIO, 0.85)
        self.seen_s = self.out_until_s = 0.0
        self.next_s = FIRST_S
        self.was_out = False
        self.client: str | None = None  # the only one that it is out for; None for all

    def reset(self) -> None:
        self.steps.reset()
        self.tokens.reset()


class OutlierEjection:
    """The comparison of each backend with its predictions, and the ejection of outliers.

    The fitted models would learn that a backend is slow as well, but too late for the requests sent there meanwhile.
    What a single client has shown is an ejection for its own requests.
    """

    def __init__(self, *, ejects: bool = True) -> None:
        self._ejects = ejects  # whether outliers are ejected; otherwise only slowness is measured
        self._records: dict[str, _Record] = {}
        self._sources = Sources(is_known=True)
        self.reasons: dict[str, str] = {}  # reason of each current ejection, by backend

    def admit(self, candidates: Sequence[Candidate], now_s: float, client: str = "") -> Sequence[Candidate]:
        """End the ejections that are due, and return the candidates not ejected, or all if none would be left."""
        if not self.reasons:
            return candidates
        for name in [*self.reasons]:
            record = self._records[name]
            if record.out_until_s <= now_s:
                del self.reasons[name]
                record.reset()  # requests that were in flight at the ejection say nothing about the present
                log.warning("%s is back in use after its ejection", name)
        return self.admitted(candidates, now_s, client)

    def admitted(self, candidates: Sequence[Candidate], now_s: float, client: str = "") -> Sequence[Candidate]:
        """Return what `admit` would return, without ending ejections."""
        if not self.reasons:
            return candidates
        ejected = {
            name
            for name in self.reasons
            if (record := self._records[name]).out_until_s > now_s and record.client in {None, client}
        }
        return [candidate for candidate in candidates if candidate.name not in ejected] or candidates

    def observe(
        self,
        backend: str,
        step_ratio: float | None,
        acceptance_ratio: float | None,
        now_s: float,
        acceptance_spread: float = DEFAULT_SPREAD,
        request: RequestFeatures = ANY_REQUEST,
        expected: float = math.inf,
        drafts: Drafts = UNCOUNTED,
    ) -> float:
        """Compare the outcome of a request with its prediction, and return the backend's `slowness`."""
        record = self._records.get(backend)
        if record is None:
            record = self._records[backend] = _Record()
        record.seen_s = now_s
        alone = self._sources.see(request)
        if step_ratio:
            record.steps.add(step_ratio, _STEP_SPREAD, request, alone)
        if acceptance_ratio:
            record.tokens.add(acceptance_ratio, max(DEFAULT_SPREAD, acceptance_spread), request, alone, drafts)
        if self._ejects and (backend not in self.reasons or record.client not in {None, request.client}):
            if record.steps.evidence.total >= EVIDENCE:
                reason = f"steps take {record.steps.mean:.1f} times as long as expected"
                self._eject(backend, record, record.steps, reason, now_s)
            elif (
                acceptance_ratio
                and record.tokens.evidence.total >= EVIDENCE
                and (gain := record.tokens.evidence.gain(drafts)) is not None
            ):
                if 1.0 + gain > POOR_RATIO * expected:
                    record.tokens.reset()
                    return self.slowness(backend, now_s)
                reason = f"tokens per step are {record.tokens.mean:.0%} of those expected"
                self._eject(backend, record, record.tokens, reason, now_s)
            elif record.was_out and record.steps.is_healthy and (record.tokens.is_healthy or not record.tokens.count):
                record.was_out, record.next_s = False, FIRST_S
        return self.slowness(backend, now_s)

    def forget(self, backend: str) -> None:
        """Drop the observations and the ejection of a backend that has left."""
        self._records.pop(backend, None)
        self.reasons.pop(backend, None)

    def slowness(self, backend: str, now_s: float) -> float:
        """Return the present step time of a backend over the predicted one, at least 1.

        The value decays until another request confirms it. For an ejected backend it is 1: otherwise it would get no
        requests after its ejection, and could not show that it has recovered.
        """
        record = self._records.get(backend)
        if record is None or backend in self.reasons or record.steps.count <= 2:
            return 1.0
        mean = record.steps.mean
        if mean <= _MIN_SLOWNESS:
            return 1.0
        return 1.0 + (mean - 1.0) * math.exp2(-max(0.0, now_s - record.seen_s) / SLOWNESS_HALF_LIFE_S)

    def _eject(self, backend: str, record: _Record, drift: _Drift, reason: str, now_s: float) -> None:
        """Eject a backend for the client whose evidence it is; for all if several have given it, or now another one."""
        client = None if backend in self.reasons else drift.evidence.client()
        record.client, whose = client, " to the requests of one key" if client else ""
        record.was_out, record.out_until_s = True, now_s + record.next_s
        record.next_s = min(LONGEST_S, 2 * record.next_s)
        record.reset()
        self.reasons[backend] = reason + whose
        log.warning("%s is ejected as an outlier for %.0f s: %s%s", backend, record.out_until_s - now_s, reason, whose)
