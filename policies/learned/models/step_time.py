"""The time of an engine step by backend: a linear function of the requests, context and prompts in its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.learned.models.keys import Key
from policies.learned.models.prior import StepCost
from policies.statistics import Sums, Table

LEAST_TOKENS: Final = 2048
"""Prompt tokens to compute, weighed, from which the time to the first token is mostly that of computing them."""


def weighed(tokens: float, cached: float, attention: float) -> float:
    """Return the first tokens of a prompt that take as long as `tokens` after `cached` ones.

    Each attends to all before it, which adds `attention` of its time for each of them (`prior.attention_share`).
    """
    return tokens * (1.0 + attention * (cached + tokens / 2))


class PromptTime:
    """Seconds per prompt token of one backend, at the beginning of a prompt.

    The times of an answer's steps tell it too, but badly where prompts are long: which of the prompts sent meanwhile
    were computed during those steps is then hardly known.
    """

    def __init__(self) -> None:
        self._log_s = 0.0
        self._count = 0.0

    def token_s(self, fitted_s: float) -> float:
        """Return the seconds per prompt token; those fitted to step times count as one observation."""
        if not self._count:
            return fitted_s
        return math.exp((math.log(max(1e-9, fitted_s)) + self._count * self._log_s) / (1.0 + self._count))

    def learn(self, seconds: float, tokens: float) -> None:
        """Add the time that a prompt took; errors beyond a factor of three count as that."""
        if tokens < LEAST_TOKENS or seconds <= 0.0:
            return
        error = math.log(seconds / tokens) - self._log_s
        if self._count:
            error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        self._count = min(_MOST, self._count + 1.0)
        self._log_s += error / self._count


_MOST: Final = 50.0
_MOST_ERROR: Final = math.log(3.0)


TERMS: Final = 4
_PAIRS: Final = [(row, column) for row in range(TERMS) for column in range(row, TERMS)]

STEPS: Final = Table("steps", 2 + len(_PAIRS) + TERMS, half_life_s=900.0, overflow=lambda key: key)
"""Normal equations of the fit by backend: count, sum of log(observed / prior), x x' (upper triangle), x y.

The half-life is short, so that an engine restarted with other settings is soon learned again.
"""

PRIOR_SPREAD: Final = 0.5
"""Relative standard deviation of each cost around the calibration's."""

NOISE: Final = 0.15
"""Relative standard deviation of a request's mean step time around the fit."""

LEAST_RATIO: Final = 0.01
MOST_RATIO: Final = 1000.0
"""Bounds of a step time over the calibration's: for a target of 8B on an H100, 70 us and 7 s."""

_OUTLIER: Final = 3.0
"""Ratio of observed and expected step time above which an observation weighs less: a stall says little about load."""


Load = tuple[float, float, float, float]
"""Regressors of step time: 1, requests, thousands of context tokens, hundreds of prompt tokens per step, weighed.

Of steps that drafted less than the maximum k, each is multiplied by what the calibration has there over what it has at
that k, so that one cost holds for all of them.
"""


def terms(requests: float, context_tokens: float, prompt_tokens_per_step: float) -> Load:
    """Return the regressors of step time."""
    return 1.0, requests, context_tokens * 1e-3, prompt_tokens_per_step * 1e-2


def seconds(cost: StepCost, load: Load) -> float:
    """Return the seconds of a step under a load."""
    base_s, per_request_s, per_context_token_s, per_prompt_token_s = cost
    ones, requests, context, prompts = load
    first_s = base_s * ones + per_request_s * requests
    return first_s + per_context_token_s * 1e3 * context + per_prompt_token_s * 1e2 * prompts


def observation(step_s: float, load: Load, prior: StepCost, expected_s: float) -> Sums | None:
    """Return the sums that a request adds to its backend's bucket; None if no engine has such a step time.

    References
    ----------
    .. [1] Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 35(1), 1964.
    """
    prior_s = seconds(prior, load)
    if not LEAST_RATIO * prior_s <= step_s <= MOST_RATIO * prior_s:
        return None
    ratio = max(step_s, expected_s) / min(step_s, expected_s)
    weight = min(1.0, _OUTLIER / ratio) / prior_s**2
    ones, requests, context, prompts = load
    by_ones, by_requests, by_context = weight * ones, weight * requests, weight * context
    by_prompts, by_s = weight * prompts, weight * step_s
    first = 1.0, math.log(step_s / prior_s)
    row = by_ones * ones, by_ones * requests, by_ones * context, by_ones * prompts
    second = by_requests * requests, by_requests * context, by_requests * prompts
    rest = by_context * context, by_context * prompts, by_prompts * prompts
    return *first, *row, *second, *rest, by_s * ones, by_s * requests, by_s * context, by_s * prompts


def fit_scale(buckets: Mapping[Key, Sums]) -> float:
    """Return the usual ratio of this pool's step times to the calibration's, 1 without observations.

    The median over the backends, so that one cannot make all look faster or slower, of their geometric means, which
    include one imaginary observation of 1.
    """
    logs = [sums[1] / (sums[0] + 1.0) for sums in of_backends(buckets).values()]
    return math.exp(median(logs)) if logs else 1.0


def of_backends(buckets: Mapping[Key, Sums]) -> dict[str, Sums]:
    """Return the sums of each backend, over all levels of its depth; sums that no engine can have are left out."""
    totals: dict[str, Sums] = {}
    for key, sums in buckets.items():
        if not _is_possible(sums):
            continue
        before = totals.get(key[0])
        totals[key[0]] = sums if before is None else tuple(map(float.__add__, before, sums))
    return totals


def fit_levels(buckets: Mapping[Key, Sums], costs: Mapping[str, StepCost]) -> dict[Key, StepCost]:
    """Return the step cost by (backend, level) in terms of its maximum k, each fitted towards the backend's."""
    scale = fit_scale(buckets)
    return {
        key: _fit(sums, costs[key[0]], scale)
        for key, sums in buckets.items()
        if len(key) > 1 and key[0] in costs and _is_possible(sums)
    }


def fit_steps(
    buckets: Mapping[Key, Sums], priors: Mapping[str, StepCost], pause: Callable[[], object] = lambda: None
) -> dict[str, StepCost]:
    """Return each backend's step cost: a non-negative ridge regression towards the scaled prior."""
    scale, totals = fit_scale(buckets), of_backends(buckets)
    costs = {}
    for name, prior in priors.items():
        pause()
        costs[name] = _fit(totals.get(name), prior.scaled(scale), scale)
    return costs


def _is_possible(sums: Sums) -> bool:
    """Return whether sums, which other gateways may have written, can be those of observations."""
    count, log = sums[:2]
    return count > 0.0 and math.log(LEAST_RATIO) <= log / count <= math.log(MOST_RATIO) and min(sums[2:]) >= 0.0


def _fit(sums: Sums | None, prior: StepCost, scale: float) -> StepCost:
    """Return a cost fitted towards a prior whose scale, that of the errors, is given."""
    from scipy.optimize import nnls  # slow to import, and only a learning gateway needs it

    if sums is None:
        return prior
    centre = np.array(
        [prior.base_s, prior.per_request_s, 1e3 * prior.per_context_token_s, 1e2 * prior.per_prompt_token_s]
    )
    spread = PRIOR_SPREAD * np.maximum(centre, 1e-9)
    precision = np.diag((NOISE / spread) ** 2)
    matrix, right = (sum_ / scale**2 for sum_ in _normal_equations(sums))
    # Scaled by the prior, so that the factorisation is well conditioned.
    matrix = (matrix + precision) * np.outer(spread, spread)
    right = (right + precision @ centre) * spread
    root = np.linalg.cholesky(matrix + 1e-12 * np.trace(matrix) * np.eye(TERMS))
    solution, _ = nnls(root.T, np.linalg.solve(root, right))
    costs = np.maximum(solution * spread, LEAST_RATIO / scale * centre)
    return StepCost(float(costs[0]), float(costs[1]), float(costs[2]) * 1e-3, float(costs[3]) * 1e-2)


def _normal_equations(sums: Sums) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    matrix = np.zeros((TERMS, TERMS))
    for (row, column), value in zip(_PAIRS, sums[2 : 2 + len(_PAIRS)], strict=True):
        matrix[row, column] = matrix[column, row] = value
    return matrix, np.array(sums[2 + len(_PAIRS) :])
