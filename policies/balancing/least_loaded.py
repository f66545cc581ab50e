"""The `least_loaded` policy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load_policy import LoadPolicy
from policies.policy import Decision, register


@register
class LeastLoaded(LoadPolicy):
    """A policy that picks the backend with the fewest requests per unit of weight.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.load_policy import LoadSettings
    >>> from backends.speculation import Method
    >>> from policies.features.request import ANY_REQUEST
    >>> pool = [Backend(name, "llama", Method.NGRAM, "http://127.0.0.1:8001") for name in ("a", "b")]
    >>> pool[0].in_flight = 3
    >>> LeastLoaded(LoadSettings()).choose(ANY_REQUEST, pool).backend
    'b'
    """

    name = "least_loaded"
    reads_requests = False

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose the least loaded candidate."""
        chosen, propensity = self.meter.least(candidates, rng or self.rng)
        return Decision(chosen.name, self.name, "fewest_in_flight", propensity)
