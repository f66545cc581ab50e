"""How long an answer will be: from the answers to requests that were alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from policies.features.request import RequestFeatures
from policies.learned.models.buckets import LIMIT, PROMPT, SHAPE, TEMPLATE, TURNS, WORKLOAD, Key, without_template
from policies.learned.models.mixed_effects import Effects, Factor, fit_effects
from policies.statistics import Sums, Table

LENGTH: Final = Table("length", 3, half_life_s=7200.0, overflow=without_template)
"""Observations, sum and sum of squares of the logarithm of output tokens, by the key of the request."""

TYPICAL_TOKENS: Final = 220.0
"""Before anything was seen: the median answer of Azure's conversation trace of 2023 is 129 tokens, its mean 211."""

SHORTEST_SEEN_TOKENS: Final = 8.0
"""Shorter answers count as this long: one of a single token is as far from a usual one as one of ten thousand."""

NOISE: Final = 0.7

FACTORS: Final = (
    Factor(lambda key: key[WORKLOAD], 0.6),
    Factor(lambda key: key[LIMIT], 0.4),
    Factor(lambda key: key[SHAPE], 0.2),
    Factor(lambda key: key[PROMPT], 0.2),
    Factor(lambda key: key[TURNS], 0.1),
    Factor(lambda key: key[TEMPLATE] and key[WORKLOAD] + "/" + key[TEMPLATE], 0.5),
    # What a longer prompt means depends on the work: a rewriting grows with it, a summary hardly.
    Factor(lambda key: f"{key[WORKLOAD]}/{key[TEMPLATE]}/{key[PROMPT]}", 0.3),
)


@dataclass(slots=True)
class LengthModel:
    """Predicts output tokens; `effects` is None before anything was seen."""

    effects: Effects | None = None

    @classmethod
    def fit(cls, buckets: Mapping[Key, Sums]) -> LengthModel:
        """Fit to what was observed."""
        if not buckets:
            return cls()
        return cls(fit_effects(buckets, FACTORS, expected=lambda key: _TYPICAL, mean_spread=1.0, noise=NOISE))

    def tokens(self, request: RequestFeatures, key: Key) -> float:
        """Return the mean number of output tokens to be expected, all sequences of the request together, at least 1."""
        effects = self.effects
        if effects is None:
            expected = TYPICAL_TOKENS
        else:
            # The mean of a log-normal distribution lies above its median.
            expected = math.exp(min(_LARGEST, _TYPICAL + effects.predict(key) + effects.noise**2 / 2))
        if request.max_tokens is not None and expected > request.max_tokens:
            expected = float(request.max_tokens)
        return max(1.0, expected) * request.n


_TYPICAL: Final = math.log(TYPICAL_TOKENS)
_LARGEST: Final = math.log(1e6)
