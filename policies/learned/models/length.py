"""The expected length of an answer, from the answers to similar requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from policies.features.request import TYPICAL_TOKENS, RequestFeatures
from policies.learned.models.keys import LIMIT, PROMPT, TEMPLATE, WORKLOAD, Key, thinking_of, without_template
from policies.learned.models.mixed_effects import Effects, Factor, fit_effects
from policies.statistics import Sums, Table

LENGTH: Final = Table("length", 3, half_life_s=7200.0, overflow=without_template)
"""Count, sum and sum of squares of log(output tokens), by request key."""

SHORTEST_SEEN_TOKENS: Final = 8.0
"""Shorter answers count as this long; in logarithms, a one-token answer is as extreme as one of ten thousand."""

NOISE: Final = 0.7

FACTORS: Final = (
    Factor(lambda key: key[WORKLOAD], 0.6),
    Factor(lambda key: key[LIMIT], 0.4),
    Factor(thinking_of, 0.5),
    Factor(lambda key: key[PROMPT], 0.2),
    Factor(lambda key: key[TEMPLATE] and key[WORKLOAD] + "/" + key[TEMPLATE], 0.5),
    # The effect of prompt length depends on the task: a rewritten text grows with the prompt, a summary hardly.
    Factor(lambda key: f"{key[WORKLOAD]}/{key[TEMPLATE]}/{key[PROMPT]}", 0.3),
)


@dataclass(slots=True)
class LengthModel:
    """A model of the number of output tokens; `effects` is None without observations."""

    effects: Effects | None = None

    @classmethod
    def fit(cls, buckets: Mapping[Key, Sums]) -> LengthModel:
        """Return a model fitted to observations."""
        buckets = _possible(buckets)
        if not buckets:
            return cls()
        return cls(fit_effects(buckets, FACTORS, expected=lambda key: _TYPICAL, mean_spread=1.0, noise=NOISE))

    def tokens(self, request: RequestFeatures, key: Key) -> float:
        """Return the expected number of output tokens over all sequences of a request, at least 1 per sequence."""
        effects = self.effects
        if effects is None:
            expected = float(TYPICAL_TOKENS)
        else:
            # The mean of a log-normal distribution is above its median.
            expected = math.exp(
                min(_LARGEST, _TYPICAL + effects.predict(key) + min(_MOST_NOISE, effects.noise) ** 2 / 2)
            )
        if request.max_tokens is not None and expected > request.max_tokens:
            expected = float(request.max_tokens)
        return max(1.0, expected) * request.n

    def log_seen(self, request: RequestFeatures, key: Key, tokens: float) -> float:
        """Return the logarithm of an answer's tokens per sequence, as it is learned.

        An answer that is far from what is expected counts as `_FAR` from it, so that no single one moves the mean much.
        """
        if request.max_tokens is not None:
            tokens = min(tokens, float(request.max_tokens))
        log, expected = math.log(max(SHORTEST_SEEN_TOKENS, tokens)), math.log(self.tokens(request, key) / request.n)
        return max(math.log(SHORTEST_SEEN_TOKENS), min(max(log, expected - _FAR), expected + _FAR))


def _possible(buckets: Mapping[Key, Sums]) -> dict[Key, Sums]:
    """Return the sums, which other gateways may have written, within the length of a context."""
    possible: dict[Key, Sums] = {}
    for key, (count, log, squares) in buckets.items():
        if count > 0.0:
            mean = min(max(0.0, log / count), _LARGEST)
            possible[key] = count, count * mean, count * min(max(mean**2, squares / count), mean * _LARGEST)
    return possible


_TYPICAL: Final = math.log(TYPICAL_TOKENS)
_FAR: Final = math.log(8.0)
_MOST_NOISE: Final = 1.0
_LARGEST: Final = math.log(1e6)
