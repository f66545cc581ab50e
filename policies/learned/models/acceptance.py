"""The expected tokens per step by request and arm, from similar requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.speculation import Method
from policies.learned.models.depth import Place, between
from policies.learned.models.keys import (
    OVERLAP,
    PROMPT,
    RESTRICTED,
    SHAPE,
    TEMPERATURE,
    TEMPLATE,
    WORKLOAD,
    Key,
    thinking_of,
    typical_prompt_tokens,
    without_template,
)
from policies.learned.models.mixed_effects import Effects, Factor, fit_effects
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_by_k, known_to_tokens
from policies.statistics import Sums, Table

ACCEPTANCE: Final = Table("acceptance", 3, half_life_s=7200.0, overflow=without_template)
"""Count, sum and sum of squares of log(tokens per step), by (arm, backend, *request key)."""

ARM, BACKEND = 0, 1
_REQUEST: Final = 2
"""Index at which the request key starts."""

NOISE: Final = 0.25
"""Standard deviation of log(tokens per step) between similar requests, in recorded acceptance."""

FACTORS: Final = (
    # A template with few observations is predicted mainly by its workload.
    Factor(lambda key: key[BACKEND], 0.1),
    Factor(lambda key: key[_REQUEST + WORKLOAD], 0.3),
    Factor(lambda key: key[_REQUEST + TEMPERATURE], 0.2),
    Factor(lambda key: RESTRICTED if key[_REQUEST + SHAPE] == RESTRICTED else "", 0.6),  # they show nothing of others
    Factor(lambda key: thinking_of(key[_REQUEST:]), 0.15),  # -10% to +22% of the tokens per step, by model
    Factor(lambda key: key[_REQUEST + OVERLAP], 0.1),
    Factor(lambda key: key[_REQUEST + PROMPT], 0.07),
    Factor(lambda key: key[_REQUEST + TEMPLATE] and key[_REQUEST + WORKLOAD] + "/" + key[_REQUEST + TEMPLATE], 0.2),
)


def most_per_step(arm: str) -> float:
    """Return the tokens that a step of an arm can give: all that it drafts, and one."""
    return float(arm.partition(":")[2]) + 1.0


def _possible(buckets: Mapping[Key, Sums]) -> dict[Key, Sums]:
    """Return the sums, which other gateways may have written, within what their arms can give."""
    possible: dict[Key, Sums] = {}
    for key, (count, log, squares) in buckets.items():
        method, _, k = key[ARM].partition(":")
        if method not in _METHODS or not k.isdecimal() or len(k) > _MOST_DIGITS or not count > 0.0:
            continue
        most = math.log(most_per_step(key[ARM]))
        mean = min(max(0.0, log / count), most)
        possible[key] = count, count * mean, count * min(max(mean**2, squares / count), mean * most)
    return possible


@dataclass(slots=True)
class AcceptanceModel:
    """A model of the tokens per step."""

    arms: Mapping[str, Effects] = field(default_factory=dict)  # fitted effects of each observed arm
    calibration: str = DEFAULT_CALIBRATION  # name of the calibration that describes arms without observations
    _counts: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _kinds: dict[tuple[str, str, str], float] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, buckets: Mapping[Key, Sums], calibration: str, pause: Callable[[], object] = lambda: None
    ) -> AcceptanceModel:
        """Return a model with every arm fitted to its observations; `pause` is called before each arm."""
        by_arm: dict[str, dict[Key, Sums]] = {}
        buckets = _possible(buckets)
        for key, sums in buckets.items():
            by_arm.setdefault(key[ARM], {})[key] = sums
        model = cls({}, calibration)
        for key, sums in buckets.items():
            if key[_REQUEST + SHAPE] == RESTRICTED:
                continue
            group = _group(key[ARM], key[_REQUEST:])
            model._counts[group] = model._counts.get(group, 0.0) + sums[0]
            kind = _kind(key[ARM], key[_REQUEST:])
            model._kinds[kind] = model._kinds.get(kind, 0.0) + sums[0]
        arms: dict[str, Effects] = {}
        for arm, arm_buckets in by_arm.items():
            pause()
            arms[arm] = fit_effects(
                arm_buckets, model.factors(arm), expected=model.expected, mean_spread=0.4, noise=NOISE
            )
        model.arms = arms
        return model

    def tokens_per_step(self, arm: str, backend: str, request: Key, context_tokens: float = 0.0) -> float:
        """Return the expected tokens per step of a backend for a request key at a mean context, at least 1.

        Without a context it is that of a typical prompt of the key, at which arms are learned.
        """
        if arm == _BASELINE:
            return 1.0
        key = (arm, backend, *request)
        effects = self.arms.get(arm)
        log = self.depths(arm, request, context_tokens)[-1] + (effects.predict(key) if effects is not None else 0.0)
        return min(math.exp(log), most_per_step(arm)) if log > 0 else 1.0

    def observations(self, arm: str, request: Key) -> float:
        """Return the number of observations of the request's template and workload on an arm; infinite for baseline."""
        return math.inf if arm == _BASELINE else self._counts.get(_group(arm, request), 0.0)

    def observations_of_kind(self, arm: str, request: Key) -> float:
        """Return the number of observations of the request's workload at its temperature on an arm.

        0 in the highest bin of temperatures, which has no upper end: one request at 1.1 tells little of one at 2.
        """
        return 0.0 if request[TEMPERATURE] == _HOTTEST else self._kinds.get(_kind(arm, request), 0.0)

    def spread(self, arm: str) -> float:
        """Return the standard deviation of log(tokens per step) around its prediction, on an arm."""
        effects = self.arms.get(arm)
        return NOISE if effects is None else effects.noise

    def expected(self, key: Key) -> float:
        """Return the calibration's log(tokens per step) for a key."""
        return self.depths(key[ARM], key[_REQUEST:])[-1]

    def depths(self, arm: str, request: Key, context_tokens: float = 0.0) -> tuple[float, ...]:
        """Return the calibration's log(tokens per step) at each k up to the arm's; see `tokens_per_step`."""
        method, _, k = arm.partition(":")
        temperature = _BIN_CENTRES[int(request[TEMPERATURE])]
        context_tokens = context_tokens or typical_prompt_tokens(request)
        return expected_by_k(self.calibration, Method(method), int(k), request[WORKLOAD], temperature, context_tokens)

    def typical(self, arm: str, request: Key, context_tokens: float) -> float:
        """Return the tokens per step at a typical context of a key over those at another, as far as that is known."""
        return math.exp(self.expected((arm, "", *request)) - self.depths(arm, request, context_tokens)[-1])

    def factors(self, arm: str) -> Sequence[Factor]:
        """Return the factors of an arm: longer prompts than its calibration knows may give anything."""
        known = known_to_tokens(self.calibration, Method(arm.partition(":")[0]))
        if known == math.inf:
            return FACTORS

        def beyond(key: Key) -> str:
            return key[_REQUEST + PROMPT] if typical_prompt_tokens(key[_REQUEST:]) > known else ""

        return (*FACTORS, Factor(lambda key: beyond(key) and "beyond", _UNKNOWN), Factor(beyond, _UNKNOWN))


def by_level(depths: Sequence[float], per_step: float, levels: Sequence[int]) -> list[float]:
    """Return the tokens per step at each k of `levels`, at least 1, of a request that has `per_step` at the maximum.

    An arm is learned at its maximum k. What a request has there beyond the expected `depths`, it has wherever anything
    is drafted.
    """
    beyond = math.log(per_step) - depths[-1]
    return [math.exp(max(0.0, depths[k] + beyond)) if k else 1.0 for k in levels]


def at_max_k(depths: Sequence[float], levels: Sequence[int], place: Place, per_step: float) -> tuple[float, float]:
    """Return the tokens per step that an answer would have had at its arm's maximum k, and the weight of that."""
    drafted = between([1.0 if k else 0.0 for k in levels], place)
    if drafted < _LEAST_DRAFTED:
        return 1.0, 0.0
    expected = math.log(between([math.exp(depths[k]) for k in levels], place))
    log = depths[-1] + (math.log(max(1.0, per_step)) - expected) / drafted
    return math.exp(min(max(0.0, log), math.log(len(depths)))), drafted


def _group(arm: str, request: Key) -> tuple[str, str, str]:
    return arm, request[WORKLOAD], request[TEMPLATE]


def _kind(arm: str, request: Key) -> tuple[str, str, str]:
    return arm, request[WORKLOAD], request[TEMPERATURE]


_UNKNOWN: Final = 0.3
"""Spread of log(tokens per step) at contexts that a calibration does not know, of all of them and of each bin."""
_LEAST_DRAFTED: Final = 0.1
"""Share of an answer's steps with drafts below which it says next to nothing of acceptance."""
_METHODS: Final = frozenset(Method)
_MOST_DIGITS: Final = 4
_BASELINE: Final = f"{Method.BASELINE.value}:0"
_BIN_CENTRES: Final = (0.0, 0.2, 0.5, 0.75, 0.95, 1.2)
"""Temperature that represents each bin of `keys.TEMPERATURES`."""
_HOTTEST: Final = "5"
"""The last of these bins."""
