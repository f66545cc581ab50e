"""The baseline policies, which consider load or nothing: the bar for every other policy."""

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
    """Settings shared by the policies that consider load."""

    stale_after_s: float = Field(
        default=STALE_AFTER_S, gt=0, description="Age in seconds above which an engine's load report is ignored."
    )
    seed: int | None = Field(
        default=None, description="Seed of the random choice among ties; none: different at each start."
    )


class LoadPolicy(Policy):
    """Base class of the policies that consider load."""

    Settings = LoadSettings
    text_features = frozenset[str]()

    def __init__(self, settings: LoadSettings) -> None:
        super().__init__(settings)
        self.meter = LoadMeter(settings.stale_after_s)
        self.rng = Random(settings.seed)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate in requests per unit of weight, counting the new request."""
        return [self.assess_load(candidate) for candidate in candidates]

    def assess_load(self, candidate: Candidate) -> Assessment:
        """Return the load of one candidate as an assessment."""
        requests = self.meter.requests(candidate)
        others = requests - candidate.in_flight
        note = f"{candidate.in_flight} in flight, {others} of others, weight {candidate.weight:g}"
        return Assessment(candidate.name, self.meter.score(candidate), note)


@register
class LeastLoaded(LoadPolicy):
    """A policy that picks the backend with the fewest requests per unit of weight.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.features.request import ANY_REQUEST
    >>> pool = [Backend(name, "llama", Method.NGRAM, "http://127.0.0.1:8001") for name in ("a", "b")]
    >>> pool[0].in_flight = 3
    >>> LeastLoaded(LoadSettings()).choose(ANY_REQUEST, pool).backend
    'b'
    """

    name = "least_loaded"
    reads_requests = False

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the least loaded candidate."""
        chosen, propensity = self.meter.least(candidates, self.rng)
        return Decision(chosen.name, self.name, "fewest_in_flight", propensity)


@register
class PowerOfTwo(LoadPolicy):
    """A policy that draws two backends at random and picks the less loaded one [1]_.

    It spreads load nearly as evenly as `least_loaded`, and many gateways that decide on equally old load reports do not
    all pick the same backend.

    References
    ----------
    .. [1] Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE Transactions on Parallel and
       Distributed Systems 12(10), 2001.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.features.request import ANY_REQUEST
    >>> pool = [Backend(name, "llama", Method.NGRAM, "http://127.0.0.1:8001") for name in ("a", "b")]
    >>> pool[0].in_flight = 3
    >>> PowerOfTwo(LoadSettings()).choose(ANY_REQUEST, pool).backend
    'b'
    """

    name = "power_of_two"
    reads_requests = False

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the less loaded of two candidates drawn at random."""
        if len(candidates) == 1:
            return Decision(candidates[0].name, self.name, "only_candidate")
        scores = self.meter.scores(candidates)
        first, second = self.rng.sample(range(len(candidates)), 2)  # in random order, so ties are broken evenly
        chosen = first if scores[first] <= scores[second] else second
        return Decision(candidates[chosen].name, self.name, "lesser_of_two", _propensity(scores, chosen))


def _propensity(scores: Sequence[float], chosen: int) -> float:
    """Return the share of pairs in which `chosen` wins, counting a tie as half a win."""
    own = scores[chosen]
    worse = sum(score > own for score in scores)
    equal = sum(score == own for score in scores) - 1
    return (worse + equal / 2) / (len(scores) * (len(scores) - 1) / 2)


class StaticSettings(LoadSettings):
    """The destination of all requests: exactly one of `backend` and `method`."""

    backend: str | None = Field(default=None, description="Name of the backend that gets every request.")
    method: Method | None = Field(default=None, description="Method whose least loaded backend gets every request.")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.backend is None) == (self.method is None):
            raise ValueError("static takes either `backend: NAME` or `method: METHOD`")
        return self

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the configured backend, if `backend` is set."""
        return {} if self.backend is None else {("backend",): self.backend}


@register
class Static(LoadPolicy):
    """A policy that always picks one backend, or the least loaded of one method; if none is available, any backend.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.features.request import ANY_REQUEST
    >>> pool = [Backend(name, "llama", Method(name), "http://127.0.0.1:8001") for name in ("baseline", "ngram")]
    >>> Static(StaticSettings(method="ngram")).choose(ANY_REQUEST, pool).backend
    'ngram'
    """

    name = "static"
    reads_requests = False
    Settings = StaticSettings
    settings: StaticSettings

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the least loaded configured candidate, or the least loaded of all if none is configured."""
        configured = [candidate for candidate in candidates if self._is_configured(candidate)]
        chosen, propensity = self.meter.least(configured or candidates, self.rng)
        reason = "configured" if configured else "configured_unavailable"
        return Decision(chosen.name, self.name, reason, propensity)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its load, noting whether it is configured."""
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
    """A policy that picks the backends in turn, each in proportion to its weight.

    The smooth weighted round robin of nginx: at each turn every candidate's credit grows by its weight, the candidate
    with the highest credit is chosen, and it pays the sum of all weights. The turns of a heavy backend are spread out.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.features.request import ANY_REQUEST
    >>> pool = [Backend(name, "llama", Method.NGRAM, "http://127.0.0.1:8001") for name in ("a", "b")]
    >>> pool[0].weight = 2.0
    >>> policy = RoundRobin(PolicySettings())
    >>> [policy.choose(ANY_REQUEST, pool).backend for _ in range(6)]
    ['a', 'b', 'a', 'a', 'b', 'a']
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
        for candidate, remaining in zip(candidates, credit, strict=True):
            self._credit[candidate.name] = remaining
        return self._decision(candidates[chosen].name)

    def _decision(self, backend: str) -> Decision:
        decision = self._decisions.get(backend)
        if decision is None:
            decision = self._decisions[backend] = Decision(backend, self.name, "next_in_turn")
        return decision

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its negated credit: the lowest score is next."""
        credit = self._after_gain(candidates, _weights(candidates))
        return [
            Assessment(candidate.name, -gained, f"credit {gained:g}, weight {candidate.weight:g}")
            for candidate, gained in zip(candidates, credit, strict=True)
        ]

    def _after_gain(self, candidates: Sequence[Candidate], weights: Sequence[float]) -> list[float]:
        pairs = zip(candidates, weights, strict=True)
        return [self._credit.get(candidate.name, 0.0) + weight for candidate, weight in pairs]


class RandomSettings(PolicySettings):
    """Settings of `random`."""

    seed: int | None = Field(default=None, description="Seed of the random choice; none: different at each start.")


@register
class RandomChoice(Policy):
    """A policy that draws a backend in proportion to its weight.

    Its decisions have known propensities, so other policies can be evaluated off-policy from its log.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.features.request import ANY_REQUEST
    >>> pool = [Backend(name, "llama", Method.NGRAM, "http://127.0.0.1:8001") for name in ("a", "b")]
    >>> RandomChoice(RandomSettings(seed=1)).choose(ANY_REQUEST, pool).propensity
    0.5
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
        weights = _weights(candidates)
        (drawn,) = self._rng.choices(range(len(candidates)), weights)
        return Decision(candidates[drawn].name, self.name, "drawn", weights[drawn] / sum(weights))


def _weights(candidates: Sequence[Candidate]) -> list[float]:
    """Return the candidates' weights, or equal weights if all are zero."""
    weights = [max(0.0, candidate.weight) for candidate in candidates]
    return weights if any(weights) else [1.0] * len(weights)
