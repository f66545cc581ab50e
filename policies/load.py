"""Load of a backend: this gateway's own requests, plus those of other clients as the engine reports them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from backends.backend import Candidate

STALE_AFTER_S: Final = 10.0
"""Age in seconds at which an engine's load report expires; several scrapes have failed by then."""

MIN_WEIGHT: Final = 1e-9


class LoadMeter:
    """Counts the requests on each backend, including those of other clients and gateways.

    `in_flight` is exact and current, but covers only this process. `EngineLoad.others` are those of its peers and of
    other clients; the latter are known only from the engine's report, as of the last scrape.
    """

    def __init__(self, stale_after_s: float = STALE_AFTER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stale_after_s = stale_after_s  # age above which a report is ignored
        self._clock = clock  # the clock of `EngineLoad.at_s`

    def oldest_s(self) -> float:
        """Return the earliest time of a report that still counts, in seconds on the meter's clock."""
        return self._clock() - self._stale_after_s

    def counts(self, candidates: Sequence[Candidate]) -> list[int]:
        """Return the number of requests on each backend."""
        oldest_s = self.oldest_s()
        return [
            candidate.in_flight + load.others if (load := candidate.load).at_s >= oldest_s else candidate.in_flight
            for candidate in candidates
        ]

    def scores(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the requests per unit of weight if the new request were sent to each backend; lower is better.

        Counting the new request makes an idle pool prefer its heaviest backend, and fills two backends of weights 2 and
        1 in the ratio 2 to 1. A backend of weight zero is the last resort.
        """
        pairs = zip(candidates, self.counts(candidates), strict=True)
        return [per_weight(candidate, count + 1) for candidate, count in pairs]

    def least(self, candidates: Sequence[Candidate], rng: Random) -> tuple[Candidate, float]:
        """Return the least loaded candidate and the probability of picking it; ties are broken at random.

        Without the random choice, all gateways in front of an idle pool would pick the same backend.
        """
        return draw_least(candidates, self.scores(candidates), rng)


def draw_least(candidates: Sequence[Candidate], scores: list[float], rng: Random) -> tuple[Candidate, float]:
    """Return the candidate of the lowest score and the probability of picking it; ties are broken at random."""
    least = min(scores)
    tied = [index for index, score in enumerate(scores) if score == least]
    chosen = tied[0] if len(tied) == 1 else tied[int(rng.random() * len(tied))]
    return candidates[chosen], 1.0 / len(tied)


def lowest_propensities(scores: list[float]) -> list[float]:
    """Return the probability with which `draw_least` picks each candidate."""
    least, tied = math.inf, 0
    for score in scores:
        if score < least:
            least, tied = score, 1
        elif score == least:
            tied += 1
    return [1.0 / tied if score == least else 0.0 for score in scores]


def per_weight(candidate: Candidate, requests: int) -> float:
    """Return the requests per unit of weight."""
    return requests / (candidate.weight or MIN_WEIGHT)


def weights_of(candidates: Sequence[Candidate]) -> list[float]:
    """Return the candidates' weights, or equal weights if all are zero."""
    weights = [max(0.0, candidate.weight) for candidate in candidates]
    return weights if any(weights) else [1.0] * len(weights)


def draw(propensities: list[float], rng: Random) -> int:
    """Return an index drawn with the given probabilities."""
    remaining = rng.random()
    for index, propensity in enumerate(propensities):
        remaining -= propensity
        if remaining < 0:
            return index
    return propensities.index(max(propensities))  # reached only by rounding errors
