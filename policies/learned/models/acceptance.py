"""How many tokens a step gives, by request and method: from what requests that were alike got."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from backends.backend import Candidate
from backends.speculation import Method
from policies.learned.models.buckets import (
    OVERLAP,
    PROMPT,
    SHAPE,
    TEMPERATURE,
    TEMPLATE,
    TURNS,
    WORKLOAD,
    Key,
    without_template,
)
from policies.learned.models.mixed_effects import Effects, Factor, fit_effects
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_tokens_per_step, known_k
from policies.statistics import Sums, Table

ACCEPTANCE: Final = Table("acceptance", 3, half_life_s=7200.0, overflow=without_template)
"""Observations, sum and sum of squares of the logarithm of tokens per step, by (arm, backend, *key of the request)."""

ARM, BACKEND = 0, 1
_REQUEST: Final = 2
"""Where the request's own key begins."""

NOISE: Final = 0.25
"""Standard deviation of log tokens per step between requests that are alike, for recorded acceptance."""

FACTORS: Final = (
    # From the general to the particular: what little is known of a template is explained by its workload first.
    Factor(lambda key: key[BACKEND], 0.1),
    Factor(lambda key: key[_REQUEST + WORKLOAD], 0.3),
    Factor(lambda key: key[_REQUEST + TEMPERATURE], 0.2),
    Factor(lambda key: key[_REQUEST + SHAPE], 0.15),
    Factor(lambda key: key[_REQUEST + OVERLAP], 0.1),
    Factor(lambda key: key[_REQUEST + PROMPT], 0.07),
    Factor(lambda key: key[_REQUEST + TURNS], 0.05),
    Factor(lambda key: key[_REQUEST + TEMPLATE] and key[_REQUEST + WORKLOAD] + "/" + key[_REQUEST + TEMPLATE], 0.2),
)


def arm_of(candidate: Candidate) -> str:
    """Return what backends share whose acceptance is the same: method and number of drafted tokens, `eagle3:3`."""
    return f"{candidate.method.value}:{known_k(candidate.method, candidate.num_speculative_tokens)}"


@dataclass(slots=True)
class AcceptanceModel:
    """Predicts tokens per step.

    Parameters
    ----------
    arms
        What was fitted for each arm that was seen.
    calibration
        What is expected of an arm before it was seen.
    """

    arms: Mapping[str, Effects] = field(default_factory=dict)
    calibration: str = DEFAULT_CALIBRATION
    _expected: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _seen: dict[tuple[str, str, str], float] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, buckets: Mapping[Key, Sums], calibration: str, pause: Callable[[], object] = lambda: None
    ) -> AcceptanceModel:
        """Fit every arm to what was observed of it, one after the other, with a pause before each."""
        by_arm: dict[str, dict[Key, Sums]] = {}
        for key, sums in buckets.items():
            by_arm.setdefault(key[ARM], {})[key] = sums
        model = cls({}, calibration)
        for key, sums in buckets.items():
            alike = _alike(key[ARM], key[_REQUEST:])
            model._seen[alike] = model._seen.get(alike, 0.0) + sums[0]
        arms: dict[str, Effects] = {}
        for arm, mine in by_arm.items():
            pause()
            arms[arm] = fit_effects(mine, FACTORS, expected=model.expected, mean_spread=0.4, noise=NOISE)
        model.arms = arms
        return model

    def tokens_per_step(self, arm: str, backend: str, request: Key) -> float:
        """Return the tokens of a step to be expected of a backend for a request, at least 1."""
        if arm == _BASELINE:
            return 1.0
        key = (arm, backend, *request)
        effects = self.arms.get(arm)
        log = self.expected(key) + (effects.predict(key) if effects is not None else 0.0)
        return math.exp(log) if log > 0 else 1.0

    def seen(self, arm: str, request: Key) -> float:
        """Return how often requests of the same template and workload were seen on an arm."""
        return math.inf if arm == _BASELINE else self._seen.get(_alike(arm, request), 0.0)

    def spread(self, arm: str) -> float:
        """Return the standard deviation of log tokens per step around what is expected of a request on an arm."""
        effects = self.arms.get(arm)
        return NOISE if effects is None else effects.noise

    def expected(self, key: Key) -> float:
        """Return the logarithm of tokens per step that the calibration has for a key."""
        known = (key[ARM], key[_REQUEST + WORKLOAD], key[_REQUEST + TEMPERATURE])
        value = self._expected.get(known)
        if value is None:
            method, _, k = known[0].partition(":")
            temperature = _MIDDLE[int(known[2])]
            tokens = expected_tokens_per_step(self.calibration, Method(method), int(k), known[1], temperature)
            value = self._expected[known] = math.log(tokens)
        return value


def _alike(arm: str, request: Key) -> tuple[str, str, str]:
    return arm, request[WORKLOAD], request[TEMPLATE]


_BASELINE: Final = f"{Method.BASELINE.value}:0"
_MIDDLE: Final = (0.0, 0.2, 0.5, 0.75, 0.95, 1.2)
"""Of the bins of `buckets.TEMPERATURES`."""
