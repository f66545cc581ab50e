"""The policies that look at load alone, or at nothing: what any other has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Self

from pydantic import Field, model_validator

from backends.backend import Candidate
from backends.speculation import Method
from policies.features.request import RequestFeatures
from policies.load import STALE_AFTER_S, LoadMeter
from policies.policy import Assessment, Decision, Policy, PolicySettings, SettingsPath, register


class LoadSettings(PolicySettings):
    """What every policy takes that looks at load."""

    stale_after_s: float = Field(
        default=STALE_AFTER_S, gt=0, description="Age in seconds from which an engine's own report of load is ignored."
    )
    seed: int | None = Field(default=None, description="Seed of the draws among equals; none: different at each start.")


class LoadPolicy(Policy):
    """Base of the policies that look at load."""

    Settings = LoadSettings
    text_features = frozenset[str]()

    def __init__(self, settings: LoadSettings) -> None:
        super().__init__(settings)
        self.meter = LoadMeter(settings.stale_after_s)
        self.rng = Random(settings.seed)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate in requests per unit of weight, the request to come counted in."""
        return [self.assess_load(candidate) for candidate in candidates]

    def assess_load(self, candidate: Candidate) -> Assessment:
        """Tell the load of one candidate."""
        requests = self.meter.requests(candidate)
        others = requests - candidate.in_flight
        note = f"{candidate.in_flight} in flight, {others} of others, weight {candidate.weight:g}"
        return Assessment(candidate.name, self.meter.score(candidate), note)


@register
class LeastLoaded(LoadPolicy):
    """Sends each request to the backend with the fewest requests for its weight."""

    name = "least_loaded"
    reads_requests = False

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the least loaded candidate."""
        chosen, propensity = self.meter.least(candidates, self.rng)
        return Decision(chosen.name, self.name, "fewest_in_flight", propensity)


@register
class PowerOfTwo(LoadPolicy):
    """Draws two backends and sends to the less loaded one.

    Nearly as even as `least_loaded`, and where many gateways decide on reports of the same age it does not send them
    all to the same backend: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10),
    2001.
    """

    name = "power_of_two"
    reads_requests = False

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the less loaded of two candidates drawn at random."""
        if len(candidates) == 1:
            return Decision(candidates[0].name, self.name, "only_candidate")
        scores = self.meter.scores(candidates)
        first, second = self.rng.sample(range(len(candidates)), 2)  # in random order, so the first may win a tie
        chosen = first if scores[first] <= scores[second] else second
        return Decision(candidates[chosen].name, self.name, "lesser_of_two", _chance(scores, chosen))


def _chance(scores: Sequence[float], chosen: int) -> float:
    """Return the probability that `chosen` is drawn and wins: the pairs it wins, half of those it ties, over all."""
    mine = scores[chosen]
    worse = sum(score > mine for score in scores)
    equal = sum(score == mine for score in scores) - 1
    return (worse + equal / 2) / (len(scores) * (len(scores) - 1) / 2)


class StaticSettings(LoadSettings):
    """Where everything goes: exactly one of the two."""

    backend: str | None = Field(default=None, description="Name of the backend that gets every request.")
    method: Method | None = Field(default=None, description="Method whose least loaded backend gets every request.")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.backend is None) == (self.method is None):
            raise ValueError("static takes either `backend: NAME` or `method: METHOD`, and not both")
        return self

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the backend named, if one is."""
        return {} if self.backend is None else {("backend",): self.backend}


@register
class Static(LoadPolicy):
    """Sends everything to one backend, or to the backends of one method; to the least loaded other if none can."""

    name = "static"
    reads_requests = False
    Settings = StaticSettings
    settings: StaticSettings

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the configured candidate, or the least loaded one where it is not among them."""
        configured = [candidate for candidate in candidates if self._is_configured(candidate)]
        chosen, propensity = self.meter.least(configured or candidates, self.rng)
        reason = "configured" if configured else "configured_unavailable"
        return Decision(chosen.name, self.name, reason, propensity)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Tell which candidates are configured, and the load that decides among several."""
        assessments = []
        for candidate in candidates:
            load = self.assess_load(candidate)
            word = "configured" if self._is_configured(candidate) else "not configured"
            assessments.append(Assessment(candidate.name, load.score, f"{word}; {load.note}"))
        return assessments

    def _is_configured(self, candidate: Candidate) -> bool:
        return candidate.name == self.settings.backend or candidate.method == self.settings.method


@register
class RoundRobin(Policy):
    """Sends to each backend in turn, as often as its weight says and evenly spread.

    The smooth weighted order of nginx: at each turn every candidate gains its weight, the highest is chosen and pays
    what all gained together. Weights 2 and 1 give a b a, a b a, ... rather than a a b.
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
        weights = _weights(candidates)
        credit = self._after_gain(candidates, weights)
        chosen = max(range(len(candidates)), key=credit.__getitem__)
        credit[chosen] -= sum(weights)
        for candidate, left in zip(candidates, credit, strict=True):
            self._credit[candidate.name] = left
        return self._decision(candidates[chosen].name)

    def _decision(self, backend: str) -> Decision:
        found = self._decisions.get(backend)
        if found is None:
            found = self._decisions[backend] = Decision(backend, self.name, "next_in_turn")
        return found

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its credit, the highest of which is next: the score is its negative."""
        credit = self._after_gain(candidates, _weights(candidates))
        return [
            Assessment(candidate.name, -gained, f"credit {gained:g}, weight {candidate.weight:g}")
            for candidate, gained in zip(candidates, credit, strict=True)
        ]

    def _after_gain(self, candidates: Sequence[Candidate], weights: Sequence[float]) -> list[float]:
        pairs = zip(candidates, weights, strict=True)
        return [self._credit.get(candidate.name, 0.0) + weight for candidate, weight in pairs]


class RandomSettings(PolicySettings):
    """What `random` takes."""

    seed: int | None = Field(default=None, description="Seed of the draws; none: different at each start.")


@register
class RandomChoice(Policy):
    """Draws a backend with its weight: the log of a known propensity that other policies can be judged from."""

    name = "random"
    Settings = RandomSettings
    text_features = frozenset[str]()
    reads_requests = False

    def __init__(self, settings: RandomSettings) -> None:
        super().__init__(settings)
        self._rng = Random(settings.seed)

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Draw a candidate."""
        weights = _weights(candidates)
        (drawn,) = self._rng.choices(range(len(candidates)), weights)
        return Decision(candidates[drawn].name, self.name, "drawn", weights[drawn] / sum(weights))


def _weights(candidates: Sequence[Candidate]) -> list[float]:
    """Return the candidates' weights; all equal where none has any."""
    weights = [max(0.0, candidate.weight) for candidate in candidates]
    return weights if any(weights) else [1.0] * len(weights)
