"""Settings and state of the policies that consider load."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from random import Random

from pydantic import Field

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load import STALE_AFTER_S, LoadMeter, per_weight
from policies.policy import Assessment, Decision, Policy, PolicySettings
from policies.roles import Explainer


class LoadSettings(PolicySettings):
    """Settings shared by the policies that consider load."""

    stale_after_s: float = Field(
        default=STALE_AFTER_S, gt=0, description="Age in seconds above which an engine's load report is ignored."
    )
    seed: int | None = Field(
        default=None, description="Seed of the random choice among ties; none: different at each start."
    )


class LoadPolicy(Policy, Explainer):
    """Base class of the policies that consider load."""

    Settings = LoadSettings
    text_features = frozenset[str]()

    def __init__(self, settings: LoadSettings) -> None:
        super().__init__(settings)
        self.meter = LoadMeter(settings.stale_after_s)
        self.rng = Random(settings.seed)

    @abstractmethod
    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose a candidate; this changes only the state of `rng`, by default the policy's own."""

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        return self.choose(request, candidates, copy.copy(self.rng))

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate in requests per unit of weight, counting the new request."""
        assessments = []
        for candidate, count in zip(candidates, self.meter.counts(candidates), strict=True):
            own, weight = candidate.in_flight, candidate.weight
            note = f"{own} in flight, {count - own} of others, weight {weight:g}"
            assessments.append(Assessment(candidate.name, per_weight(candidate, count + 1), note))
        return assessments
