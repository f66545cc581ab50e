"""How much work a backend has: this gateway's own requests, and what the engine reports of others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from backends.backend import Candidate

STALE_AFTER_S: Final = 10.0
"""Age from which an engine's report no longer counts; several scrapes have failed by then."""

_INSTEAD_OF_ZERO: Final = 1e-9


class LoadMeter:
    """Counts the requests on each backend, those of other clients and gateways included.

    `in_flight` is exact and current, but knows only this process. The engine's report knows everybody, but is as old
    as the last scrape. So of the report only the others' requests are taken, and every request of ours counts at once.

    Parameters
    ----------
    stale_after_s
        A report older than this counts as none, and so does one that was never made.
    clock
        The clock of `EngineLoad.at_s`, in seconds.
    """

    def __init__(self, stale_after_s: float = STALE_AFTER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock

    def requests(self, candidate: Candidate) -> int:
        """Return the requests on a backend, as far as known."""
        return self.counts((candidate,))[0]

    def oldest_s(self) -> float:
        """Return from when on a report counts: the others' requests in an older one do not."""
        return self._clock() - self._stale_after_s

    def counts(self, candidates: Sequence[Candidate]) -> list[int]:
        """Return the requests on each of several backends, as far as known."""
        oldest_s = self.oldest_s()
        return [
            one.in_flight + load.others if (load := one.load).at_s >= oldest_s else one.in_flight for one in candidates
        ]

    def per_weight(self, candidate: Candidate) -> float:
        """Return the requests on a backend per unit of its weight."""
        return per_weight(candidate, self.requests(candidate))

    def score(self, candidate: Candidate) -> float:
        """Return requests per unit of weight with one more sent there; less is better.

        The one more is the request to be placed: an idle pool prefers its heaviest backend, and two backends of weights
        2 and 1 fill up 2 to 1. A weight of zero makes a backend the last resort.
        """
        return self.scores((candidate,))[0]

    def scores(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the score of each of several backends."""
        pairs = zip(candidates, self.counts(candidates), strict=True)
        return [per_weight(candidate, count + 1) for candidate, count in pairs]

    def least(self, candidates: Sequence[Candidate], rng: Random) -> tuple[Candidate, float]:
        """Return the least loaded candidate, and the probability that it was picked: ties are drawn at random.

        Without the draw, all gateways in front of an idle pool would send to the same backend.
        """
        return draw_least(candidates, self.scores(candidates), rng)


def draw_least(candidates: Sequence[Candidate], scores: Sequence[float], rng: Random) -> tuple[Candidate, float]:
    """Return the candidate of the lowest score, and the probability that it was picked: ties are drawn at random."""
    lowest = min(scores)
    tied = [candidate for candidate, score in zip(candidates, scores, strict=True) if score == lowest]
    if len(tied) == 1:
        return tied[0], 1.0
    return tied[int(rng.random() * len(tied))], 1.0 / len(tied)


def per_weight(candidate: Candidate, requests: int) -> float:
    """Return so many requests as they weigh on a backend."""
    return requests / (candidate.weight or _INSTEAD_OF_ZERO)
