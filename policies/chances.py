"""With what probability each candidate is chosen, and the draw."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.backend import Candidate
from policies.decision import Considered
from policies.predict import Prediction

_LEAST_WEIGHT = 1e-9


def of_the_least(costs: Sequence[float]) -> list[float]:
    """Return 1 for the first candidate of the least cost, 0 for the others."""
    chances = [0.0] * len(costs)
    chances[costs.index(min(costs))] = 1.0
    return chances


def of_least_loaded(candidates: Sequence[Candidate], predictions: Sequence[Prediction]) -> list[float]:
    """Return the chances of `least_loaded`: those that tie share them."""
    scores = [
        (prediction.requests + 1) / max(candidate.weight, _LEAST_WEIGHT)
        for candidate, prediction in zip(candidates, predictions, strict=True)
    ]
    least = min(scores)
    chance = 1.0 / scores.count(least)
    return [chance if score == least else 0.0 for score in scores]


def mixed(most: Sequence[float], few: Sequence[float], share: float) -> list[float]:
    """Return the chances of choosing by `few` with probability `share`, else by `most`."""
    kept = 1.0 - share
    return [kept * one + share * other for one, other in zip(most, few, strict=True)]


def draw(chances: Sequence[float], rng: Random) -> int:
    """Return the place that is drawn."""
    drawn = rng.random()
    for place, chance in enumerate(chances):
        drawn -= chance
        if drawn < 0:
            return place
    return chances.index(max(chances))  # what rounding left over


def told(candidates: Sequence[Candidate], predictions: Sequence[Prediction], chances: Sequence[float]) -> Considered:
    """Return what was thought of each candidate, for the record."""
    return Considered(candidates, [prediction.own_s for prediction in predictions], chances)
