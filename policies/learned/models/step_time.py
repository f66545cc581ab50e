"""How long an engine step takes, by backend and load: linear in the requests, context and prompts in its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.learned.models.buckets import Key
from policies.learned.models.prior import StepCost
from policies.statistics import Sums, Table

TERMS: Final = 4
_PAIRS: Final = [(row, column) for row in range(TERMS) for column in range(row, TERMS)]

STEPS: Final = Table("steps", 2 + len(_PAIRS) + TERMS, half_life_s=900.0, overflow=lambda key: key)
"""Normal equations of the fit by backend: weight, sum of log(observed / expected), x x' (upper half), x y.

A quarter of an hour: an engine that was restarted with other settings should be known again soon.
"""

PRIOR_SPREAD: Final = 0.5
"""Relative standard deviation of each cost around the calibration's."""

NOISE: Final = 0.15
"""Relative standard deviation of a request's mean step time around the fit."""

_OUTLIER: Final = 3.0
"""Ratio from which an observation counts for less: a stall says little about the load."""


Load = tuple[float, float, float, float]
"""What a step's time is linear in: 1, requests, thousands of context tokens, hundreds of prompt tokens."""


def terms(requests: float, context_tokens: float, prompt_tokens_per_step: float) -> Load:
    """Return what a step's time is linear in."""
    return 1.0, requests, context_tokens * 1e-3, prompt_tokens_per_step * 1e-2


def seconds(cost: StepCost, load: Load) -> float:
    """Return the seconds of a step under a load given as `terms`."""
    base_s, per_request_s, per_context_token_s, per_prompt_token_s = cost
    _, requests, context, prompts = load
    return base_s + per_request_s * requests + per_context_token_s * 1e3 * context + per_prompt_token_s * 1e2 * prompts


def observation(step_s: float, load: Load, prior: StepCost, expected_s: float) -> Sums:
    """Return what a request adds to its backend's cell.

    Parameters
    ----------
    step_s
        Mean seconds between its steps.
    load
        Mean `terms` over its life.
    prior
        The calibration's costs, whose scale is learned with the whole pool.
    expected_s
        What was expected; errors are relative to it, and the farther off, the less an observation weighs (Huber's
        weights: "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 35(1), 1964).
    """
    off = max(step_s, expected_s) / min(step_s, expected_s)
    weight = min(1.0, _OUTLIER / off) / expected_s**2
    _, requests, context, prompts = load
    of_requests, of_context, of_prompts = weight * requests, weight * context, weight * prompts
    by_time = weight * step_s
    return (  # in the order of `_PAIRS`
        1.0,
        math.log(step_s / seconds(prior, load)),
        weight,
        of_requests,
        of_context,
        of_prompts,
        of_requests * requests,
        of_requests * context,
        of_requests * prompts,
        of_context * context,
        of_context * prompts,
        of_prompts * prompts,
        by_time,
        by_time * requests,
        by_time * context,
        by_time * prompts,
    )


def fit_scale(buckets: Mapping[Key, Sums]) -> float:
    """Return how many times as long as the calibration's steps those of this pool take; 1 before anything was seen."""
    count = sum(sums[0] for sums in buckets.values())
    log = sum(sums[1] for sums in buckets.values())
    return math.exp(log / (count + 1.0)) if count else 1.0


def fit_steps(
    buckets: Mapping[Key, Sums], priors: Mapping[str, StepCost], pause: Callable[[], object] = lambda: None
) -> dict[str, StepCost]:
    """Fit each backend's costs: least squares, none below zero, drawn towards the scaled prior.

    Parameters
    ----------
    cells
        By (backend,).
    priors
        The calibration's costs, by backend; only these backends are fitted.
    pause
        Called before each.
    """
    scale = fit_scale(buckets)
    costs = {}
    for name, prior in priors.items():
        pause()
        costs[name] = _fit(buckets.get((name,)), prior.scaled(scale))
    return costs


def _fit(sums: Sums | None, prior: StepCost) -> StepCost:
    from scipy.optimize import nnls  # with scikit-learn: only a learning gateway needs it

    if sums is None or sums[0] <= 0:
        return prior
    centre = np.array(
        [prior.base_s, prior.per_request_s, 1e3 * prior.per_context_token_s, 1e2 * prior.per_prompt_token_s]
    )
    spread = PRIOR_SPREAD * np.maximum(centre, 1e-9)
    precision = np.diag((NOISE / spread) ** 2)
    matrix, right = _normal_equations(sums)
    # In the scale of the prior, so that the factorisation is well conditioned.
    matrix = (matrix + precision) * np.outer(spread, spread)
    right = (right + precision @ centre) * spread
    root = np.linalg.cholesky(matrix + 1e-12 * np.trace(matrix) * np.eye(TERMS))
    solution, _ = nnls(root.T, np.linalg.solve(root, right))
    costs = solution * spread
    return StepCost(float(costs[0]), float(costs[1]), float(costs[2]) * 1e-3, float(costs[3]) * 1e-2)


def _normal_equations(sums: Sums) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    matrix = np.zeros((TERMS, TERMS))
    for (row, column), value in zip(_PAIRS, sums[2 : 2 + len(_PAIRS)], strict=True):
        matrix[row, column] = matrix[column, row] = value
    return matrix, np.array(sums[2 + len(_PAIRS) :])
