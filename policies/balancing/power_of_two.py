"""The `power_of_two` policy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load_policy import LoadPolicy
from policies.policy import Decision, register


@register
class PowerOfTwo(LoadPolicy):
    """A policy that draws two backends at random and picks the less loaded one [1]_.

    It spreads load nearly as evenly as `least_loaded`, and many gateways that decide on equally old load reports do not
    all pick the same backend.

    References
    ----------
    .. [1] Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE Transactions on Parallel and
       Distributed Systems 12(10), 2001.
    """

    name = "power_of_two"
    reads_requests = False

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose the less loaded of two candidates drawn at random."""
        if len(candidates) == 1:
            return Decision(candidates[0].name, self.name, "only_candidate")
        scores = self.meter.scores(candidates)
        first, second = (rng or self.rng).sample(range(len(candidates)), 2)  # in random order: even ties
        chosen = first if scores[first] <= scores[second] else second
        return Decision(candidates[chosen].name, self.name, "lesser_of_two", _propensity(scores, chosen))


def _propensity(scores: Sequence[float], chosen: int) -> float:
    """Return the share of pairs in which `chosen` wins, counting a tie as half a win."""
    own = scores[chosen]
    worse = sum(score > own for score in scores)
    equal = sum(score == own for score in scores) - 1
    return (worse + equal / 2) / (len(scores) * (len(scores) - 1) / 2)
