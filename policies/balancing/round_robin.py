"""The `round_robin` policy."""

from __future__ import annotations

from collections.abc import Sequence

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load import weights_of
from policies.policy import Assessment, Decision, Policy, PolicySettings, register
from policies.roles import Explainer, Informed


@register
class RoundRobin(Policy, Explainer, Informed):
    """A policy that picks the backends in turn, each in proportion to its weight.

    The smooth weighted round robin of nginx: at each turn every candidate's credit grows by its weight, the candidate
    with the highest credit is chosen, and it pays the sum of all weights. The turns of a heavy backend are spread out.
    """

    name = "round_robin"
    text_features = frozenset[str]()
    reads_requests = False

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._credit: dict[str, float] = {}
        self._decisions: dict[str, Decision] = {}

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate whose turn it is."""
        if len(candidates) == 1:
            return self._decision(candidates[0].name)
        weights = weights_of(candidates)
        credit = self._after_gain(candidates, weights)
        chosen = credit.index(max(credit))
        credit[chosen] -= sum(weights)
        for candidate, remaining in zip(candidates, credit, strict=True):
            self._credit[candidate.name] = remaining
        return self._decision(candidates[chosen].name)

    def forget(self, backend: str) -> None:
        """Drop the credit of a backend that has left."""
        self._credit.pop(backend, None)
        self._decisions.pop(backend, None)

    def _decision(self, backend: str) -> Decision:
        decision = self._decisions.get(backend)
        if decision is None:
            decision = self._decisions[backend] = Decision(backend, self.name, "next_in_turn")
        return decision

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision of the next turn."""
        credit = self._after_gain(candidates, weights_of(candidates))
        return self._decision(candidates[credit.index(max(credit))].name)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its negated credit: the lowest score is next."""
        credit = self._after_gain(candidates, weights_of(candidates))
        return [
            Assessment(candidate.name, -gained, f"credit {gained:g}, weight {candidate.weight:g}")
            for candidate, gained in zip(candidates, credit, strict=True)
        ]

    def _after_gain(self, candidates: Sequence[Candidate], weights: Sequence[float]) -> list[float]:
        pairs = zip(candidates, weights, strict=True)
        return [self._credit.get(candidate.name, 0.0) + weight for candidate, weight in pairs]
