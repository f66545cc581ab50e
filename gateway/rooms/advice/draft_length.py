"""Rule: k is too large, or too small, for the acceptance by position."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from backends.speculation import Method
from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence, Positions, Steps
from gateway.rooms.advice.finding import MIN_ANSWERS, OF, Finding, Floats, Gain, gain_of, lines, relative_time
from policies.learned.prior import StepCost

MAX_K: Final = 10
"""Largest k that is advised."""
DRAWS: Final = 400
COST_SPREAD: Final = 0.2
"""Relative standard deviation of the time that another k adds to a step, as between calibrations of machines."""
REQUEST_SPREAD: Final = 0.8
"""Standard deviation between requests of the logits of acceptance; the calibrations have 0.4 to 0.8."""
_FADING: Final = (0.85, 1.0)
"""Range of the ratio of acceptance at a position never drafted to that at the last one."""
_VARIABLE: Final = (Method.BASELINE, Method.NGRAM, Method.SUFFIX)
"""Methods that draft nothing in many steps, so that their k costs little."""
MIN_DRAFTS: Final = 2000
_MOST_REQUESTS: Final = 400


def draft_length(model: ModelEvidence) -> list[Finding]:
    """Return the backends on which another k would be faster."""
    return [finding for backend in model.backends if (finding := _of_backend(model.name, backend)) is not None]


def _of_backend(model: str, backend: BackendEvidence) -> Finding | None:
    positions, steps, k = backend.positions, backend.steps, backend.k
    if positions is None or steps is None or backend.is_silent or backend.method in _VARIABLE:
        return None
    if backend.answers < MIN_ANSWERS or positions.drafts < MIN_DRAFTS or k not in backend.cost_by_k:
        return None
    gains = gains_by_k(backend, positions, steps)
    best = max(gains, key=lambda each: gains[each].share)
    if best == k or not gains[best].is_worth_it:
        return None
    rates = ", ".join(f"{count / positions.drafts:.0%}" for count in positions.accepted)
    title = f"k = {k} is too {'large' if best < k else 'small'}: k = {best} is faster"
    evidence = (
        f"{positions.drafts:,} drafts, {backend.answers:,.0f} answers; accepted up to position 1, 2, ...: {rates}; "
        f"steps of another k as by {backend.calibration}"
    )
    change = lines(model, backend.name, "speculative_config:", f"  num_speculative_tokens: {best} # {k}")
    return Finding("draft_length", model, backend.name, title, gains[best], evidence, change)


def gains_by_k(backend: BackendEvidence, positions: Positions, steps: Steps) -> dict[int, Gain]:
    """Return the gain of each k over the current one.

    Up to the current k, counts by position give the tokens per step. A step of another k takes the measured time,
    scaled by the ratio of the calibration's step times. Faster answers also mean fewer requests in the batch (Little's
    law), which is solved for.
    """
    k, rng = backend.k, np.random.default_rng(0)
    drawn = reach(positions, max(backend.cost_by_k), backend.answers, rng)
    tokens = 1.0 + np.cumsum(drawn, axis=1)  # shape (draws, k)
    error = rng.normal(1.0, COST_SPREAD, DRAWS)
    gains = {}
    for other, cost in backend.cost_by_k.items():
        fewer = tokens[:, k - 1] / tokens[:, other - 1]

        def step_s(load: Floats, changed: StepCost = cost) -> Floats:
            calibrated, known = (np.array(one) @ load for one in (backend.cost_by_k[k], steps.cost))
            return np.asarray(known * (1.0 + error * (np.array(changed) @ load / calibrated - 1.0)))

        gains[other] = gain_of(1.0 - relative_time(steps.load, steps.fitted_s, step_s, fewer), OF)
    return gains


def reach(positions: Positions, longest: int, answers: float, rng: np.random.Generator) -> Floats:
    """Return draws of the share of drafts that are accepted at least up to each position, shape (draws, longest)."""
    counted = np.array(positions.accepted, float) / positions.drafts
    before = np.concatenate([[1.0], counted[:-1]])
    rates = np.clip(np.divide(counted, before, out=np.zeros_like(counted), where=before > 0), 1e-3, 1 - 1e-3)
    requests = max(1, round(min(answers, _MOST_REQUESTS)))
    shifts = rng.normal(0.0, REQUEST_SPREAD, (DRAWS, requests))
    relative = np.empty((DRAWS, len(counted)))
    survives = np.ones_like(shifts)
    for position, rate in enumerate(rates):
        survives = survives / (1.0 + np.exp(-(math.log(rate / (1.0 - rate)) + shifts)))
        relative[:, position] = survives.mean(axis=1)
    relative /= relative.mean(axis=0)
    relative = 1.0 + (relative - 1.0) * math.sqrt(requests / answers)
    reached = np.empty((DRAWS, max(longest, len(counted))))
    reached[:, : len(counted)] = np.clip(counted * relative, 0.0, 1.0)
    fading = rng.uniform(*_FADING, DRAWS) * rates[-1]
    for position in range(len(counted), reached.shape[1]):
        reached[:, position] = reached[:, position - 1] * fading
    return reached
