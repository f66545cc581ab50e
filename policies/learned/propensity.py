"""With what probability each candidate is chosen, and the draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final

from backends.backend import Candidate
from policies.decision import CandidateScores
from policies.learned.predict import Prediction

_LEAST_WEIGHT: Final = 1e-9


def place_of_least(costs: list[float]) -> int:
    """Return where the least cost stands, the first of several."""
    best = 0
    for place, cost in enumerate(costs):
        if cost < costs[best]:
            best = place
    return best


def of_the_least(costs: list[float]) -> list[float]:
    """Return 1 for the first candidate of the least cost, 0 for the others."""
    propensities = [0.0] * len(costs)
    propensities[place_of_least(costs)] = 1.0
    return propensities


def of_least_loaded(candidates: Sequence[Candidate], predictions: list[Prediction]) -> list[float]:
    """Return the chances of `least_loaded`: those that tie share them."""
    scores = []
    least, tied = math.inf, 0
    for place, candidate in enumerate(candidates):
        score = (predictions[place].requests + 1) / max(candidate.weight, _LEAST_WEIGHT)
        scores.append(score)
        if score < least:
            least, tied = score, 1
        elif score == least:
            tied += 1
    chance = 1.0 / tied
    return [chance if score == least else 0.0 for score in scores]


def mixed(most: float, few: float, share: float) -> float:
    """Return the chance of a candidate that has the one by `few` with probability `share`, else the other."""
    return (1.0 - share) * most + share * few


def draw(propensities: list[float], rng: Random) -> int:
    """Return the place that is drawn."""
    drawn = rng.random()
    for place, chance in enumerate(propensities):
        drawn -= chance
        if drawn < 0:
            return place
    return propensities.index(max(propensities))  # what rounding left over


def told(
    candidates: Sequence[Candidate], predictions: list[Prediction], most: list[float], few: list[float], share: float
) -> CandidateScores:
    """Return what was thought of each candidate, for the record; their chances as `mixed` has them."""
    propensities = [mixed(most[place], few[place], share) for place in range(len(predictions))]
    return CandidateScores(candidates, [prediction.own_s for prediction in predictions], propensities)
