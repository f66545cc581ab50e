"""Acceptance of drafts of a draft model, drawn from the calibrated acceptance by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import Acceptance, Calibration
from backends.drafting.script import Steps, plain_steps
from backends.speculation import Method


def model_based_replay(
    rng: np.random.Generator,
    calibration: Calibration,
    method: Method,
    k: int,
    temperature: float,
    kind: str,
    output_tokens: int,
) -> Steps:
    """Draw how many tokens each step of a request emits under a method with a draft model.

    Each output token t has a hardness u_t, uniform in [0, 1). Its draft at position j of a step is accepted if the
    drafts before it were and u_t < a_j, so that steps that start at neighbouring positions agree with each other, as
    recorded ones do. The a_j are the calibration's for the method and the kind of text, and fall with temperature. One
    shift of their logits, drawn once per request, gives the observed spread between requests; another, if calibrated,
    follows the length of the answer so far.
    """
    emitted, drafted = plain_steps(output_tokens)
    if k < 1 or output_tokens < 2:
        return emitted, drafted
    profile = calibration.acceptance(method, kind)
    at_zero = np.asarray(profile.by_position)[np.minimum(np.arange(k), len(profile.by_position) - 1)]
    starts = np.arange(1, output_tokens)
    shift = profile.request_spread * rng.standard_normal() + _progress_shift(profile, starts)
    odds = (at_zero / (1 - at_zero))[:, None] * np.exp(shift)
    rates = np.broadcast_to(odds / (1 + odds) * calibration.temperature.factor(temperature), (k, output_tokens - 1))

    hardness = np.ones(output_tokens + k)  # nothing is accepted beyond the end
    hardness[:output_tokens] = rng.random(output_tokens)
    still = np.ones(output_tokens - 1, bool)
    accepted = np.zeros(output_tokens - 1, np.int64)
    for position in range(k):
        still &= hardness[starts + position] < rates[position]
        accepted += still
    emitted[1:] = np.minimum(accepted + 1, output_tokens - starts)
    drafted[1:] = k
    return emitted, drafted


def _progress_shift(profile: Acceptance, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the shift of the logits at output positions `starts`, same shape; zeros of shape (1,) if uncalibrated."""
    progress = profile.progress
    if progress is None:
        return np.zeros(1)
    return np.interp(starts, progress.output_tokens, progress.logit_shifts)
