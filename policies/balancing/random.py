"""The `random` policy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pydantic import Field

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load import weights_of
from policies.policy import Decision, Policy, PolicySettings, register


class RandomSettings(PolicySettings):
    """Settings of `random`."""

    seed: int | None = Field(default=None, description="Seed of the random choice; none: different at each start.")


@register
class RandomChoice(Policy):
    """A policy that draws a backend in proportion to its weight.

    Its decisions have known propensities, so other policies can be evaluated off-policy from its log.
    """

    name = "random"
    Settings = RandomSettings
    text_features = frozenset[str]()
    reads_requests = False

    def __init__(self, settings: RandomSettings) -> None:
        super().__init__(settings)
        self._rng = Random(settings.seed)

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Draw a candidate."""
        weights = weights_of(candidates)
        (drawn,) = self._rng.choices(range(len(candidates)), weights)
        return Decision(candidates[drawn].name, self.name, "drawn", weights[drawn] / sum(weights))
