"""The probability of choosing each candidate (its propensity), and the random choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final

from backends.backend import Candidate
from policies.decision import CandidateScores
from policies.learned.predict import Prediction

_MIN_WEIGHT: Final = 1e-9


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


def greedy_propensities(costs: list[float]) -> list[float]:
    """Return 1 for the first candidate of the lowest cost, 0 for the others.

    Examples
    --------
    >>> greedy_propensities([2.0, 1.0, 1.0])
    [0.0, 1.0, 0.0]
    """
    propensities = [0.0] * len(costs)
    propensities[argmin(costs)] = 1.0
    return propensities


def least_loaded_propensities(candidates: Sequence[Candidate], predictions: list[Prediction]) -> list[float]:
    """Return the propensities of `least_loaded`, which breaks ties at random."""
    scores = []
    lowest, tied = math.inf, 0
    for index, candidate in enumerate(candidates):
        score = (predictions[index].requests + 1) / max(candidate.weight, _MIN_WEIGHT)
        scores.append(score)
        if score < lowest:
            lowest, tied = score, 1
        elif score == lowest:
            tied += 1
    propensity = 1.0 / tied
    return [propensity if score == lowest else 0.0 for score in scores]


def mixed(learned: float, control: float, control_share: float) -> float:
    """Return a propensity if the control policy decides with probability `control_share`.

    Examples
    --------
    >>> mixed(learned=1.0, control=0.5, control_share=0.5)
    0.75
    """
    return (1.0 - control_share) * learned + control_share * control


def draw(propensities: list[float], rng: Random) -> int:
    """Return an index drawn with the given probabilities.

    Examples
    --------
    >>> draw([0.0, 1.0], Random(1))
    1
    """
    remaining = rng.random()
    for index, propensity in enumerate(propensities):
        remaining -= propensity
        if remaining < 0:
            return index
    return propensities.index(max(propensities))  # reached by rounding errors only


def candidate_scores(
    candidates: Sequence[Candidate],
    predictions: list[Prediction],
    learned: list[float],
    control: list[float],
    control_share: float,
) -> CandidateScores:
    """Return the predictions and propensities of all candidates, for the recorder."""
    propensities = [mixed(learned[index], control[index], control_share) for index in range(len(predictions))]
    return CandidateScores(candidates, [prediction.own_s for prediction in predictions], propensities)
