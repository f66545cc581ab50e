"""The probability of choosing each candidate (its propensity), and the random choice."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.backend import Candidate
from policies.learned.predict import Prediction
from policies.load import MIN_WEIGHT, lowest_propensities


def argmin(costs: list[float]) -> int:
    """Return the index of the lowest cost, the first of several.

    Examples
    --------
    >>> argmin([2.0, 1.0, 1.0])
    1
    """
    best = 0
    for index, cost in enumerate(costs):
        if cost < costs[best]:
            best = index
    return best


def least_loaded_propensities(candidates: Sequence[Candidate], predictions: list[Prediction]) -> list[float]:
    """Return the propensities of `least_loaded`."""
    scores = []
    for index, one in enumerate(predictions):
        scores.append((one.requests + 1) / (candidates[index].weight or MIN_WEIGHT))
    return lowest_propensities(scores)


def draw(propensities: list[float], rng: Random) -> int:
    """Return an index drawn with the given probabilities."""
    remaining = rng.random()
    for index, propensity in enumerate(propensities):
        remaining -= propensity
        if remaining < 0:
            return index
    return propensities.index(max(propensities))  # reached by rounding errors only
