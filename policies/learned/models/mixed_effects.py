"""A number that depends on several things at once, each of which was seen often or seldom.

The model is a sum of effects, one for each level of each factor: `y = mean + workload + template + prompt length ...`.
Each effect is drawn towards zero, the more the less it was seen, so that a template of which little is known is taken
for an ordinary one of its workload, and a workload of which nothing is known for an ordinary request. That is a mixed
model with known variances, whose best prediction is a ridge regression on scaled dummies: Robinson, "That BLUP is a
good thing: the estimation of random effects", Statistical Science 6(1), 1991.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that the number depends on.

    Parameters
    ----------
    level
        Which level of it a cell's key has; an empty string means that there is nothing to tell it by.
    spread
        Standard deviation of the effects of its levels.
    """

    level: Callable[[Key], str]
    spread: float


@dataclass(slots=True)
class Effects:
    """What a fit found: everything that a prediction needs.

    Attributes
    ----------
    noise
        Standard deviation of single observations around their prediction.
    """

    factors: Sequence[Factor]
    mean: float
    by_level: Sequence[Mapping[str, float]]
    noise: float
    observations: float = 0.0
    _known: dict[Key, float] = field(default_factory=dict)

    def predict(self, key: Key) -> float:
        """Return the number to be expected for a key; remembered, for most requests are like others."""
        value = self._known.get(key)
        if value is None:
            value = self.mean
            for factor, effects in zip(self.factors, self.by_level, strict=True):
                value += effects.get(factor.level(key), 0.0)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = value
        return value


_REMEMBERED: Final = 10_000


def fit_effects(
    buckets: Mapping[Key, Sequence[float]],
    factors: Sequence[Factor],
    *,
    expected: Callable[[Key], float],
    mean_spread: float,
    noise: float,
) -> Effects:
    """Fit the effects to sums of observations.

    Parameters
    ----------
    cells
        For each key: number of observations, their sum, and the sum of their squares.
    factors
        What they depend on.
    expected
        What would be expected of a key before anything was seen; the model is of the differences to it.
    mean_spread
        Standard deviation of the common mean of those differences.
    noise
        Standard deviation of single observations around their prediction, before it can be estimated.
    """
    from scipy.sparse import csr_array  # here, for they take a second to import and only a learning gateway needs them
    from sklearn.linear_model import Ridge

    used = [(key, sums) for key, sums in buckets.items() if sums[0] > 0]
    if not used:
        return Effects(factors, 0.0, [{} for _ in factors], noise)
    counts = np.array([sums[0] for _, sums in used])
    residuals = np.array([sums[1] / sums[0] - expected(key) for key, sums in used])
    columns: dict[tuple[int, str], int] = {}
    scales = [mean_spread]
    places: list[int] = []
    ends = [0]
    for key, _ in used:
        places.append(0)
        for number, factor in enumerate(factors):
            level = factor.level(key)
            if not level:
                continue
            column = columns.setdefault((number, level), len(columns) + 1)
            if column == len(scales):
                scales.append(factor.spread)
            places.append(column)
        ends.append(len(places))
    scale = np.array(scales)
    # Few of the levels are a cell's: written out whole, it would take twenty times as long.
    design = csr_array((scale[places], places, ends), shape=(len(used), len(scale)))
    # Conjugate gradients never fill the matrix: with 4,000 templates they take 0.04 s, a factorisation 2.5 s, during
    # most of which no other thread runs, that of the event loop neither.
    ridge = Ridge(alpha=noise**2, fit_intercept=False, solver="sparse_cg", tol=_PRECISION)
    ridge.fit(design, residuals, sample_weight=counts)
    effects = scale * ridge.coef_
    by_level: list[dict[str, float]] = [{} for _ in factors]
    for (number, level), column in columns.items():
        by_level[number][level] = float(effects[column])
    # Within cells the squares tell it, between cells the distance to the fit.
    squares = np.array([sums[2] - sums[1] ** 2 / sums[0] for _, sums in used])
    between = counts * (residuals - design @ ridge.coef_) ** 2
    total = float(counts.sum())
    seen = float(
        np.sqrt((max(0.0, float(squares.sum() + between.sum())) + _NOISE_WEIGHT * noise**2) / (total + _NOISE_WEIGHT))
    )
    return Effects(factors, float(effects[0]), by_level, seen, total)


_PRECISION = 1e-8
"""Of the solution, relative: more than the observations have."""

_NOISE_WEIGHT = 20.0
