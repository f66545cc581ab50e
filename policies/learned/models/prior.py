"""Prior expectations of a backend without observations, from the simulator's calibrations."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from backends.calibration.calibration import Kind, load_calibration
from backends.calibration.draft_profile import DraftProfile, draft_profile
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method

DEFAULT_CALIBRATION = "llama-3.1-8b-h100"

_CONTEXT_TOKENS = 600
"""Context at which a relative verification cost is converted to seconds."""

_SIMILAR = {
    Method.MLP_SPECULATOR: Method.MEDUSA,
    Method.MEDUSA: Method.EAGLE,
    Method.DFLASH: Method.EAGLE3,
    Method.DSPARK: Method.EAGLE3,
    Method.CUSTOM_CLASS: Method.EAGLE,
    Method.MTP: Method.EAGLE,
    Method.DRAFT_MODEL: Method.EAGLE3,
    Method.EAGLE: Method.EAGLE3,
    Method.EAGLE3: Method.EAGLE,
}
"""The method whose figures are used for a method that a calibration lacks."""


class StepCost(NamedTuple):
    """Seconds of one engine step, as a linear function of its load.

    Parameters
    ----------
    base_s
        Seconds with an empty batch.
    per_request_s
        Seconds per request in the batch, for verifying and drafting its tokens.
    per_context_token_s
        Seconds per context token of those requests.
    per_prompt_token_s
        Seconds per prompt token that the step computes.

    Examples
    --------
    >>> StepCost(0.008, 1e-4, 2e-7, 3e-5).scaled(2.0).base_s
    0.016
    """

    base_s: float
    per_request_s: float
    per_context_token_s: float
    per_prompt_token_s: float

    def scaled(self, factor: float) -> StepCost:
        """Return the cost of an engine that takes `factor` times as long."""
        return StepCost(*[factor * seconds for seconds in self])


_DEFAULT_K = {Method.SUFFIX: 24}


def effective_k(method: Method, k: int) -> int:
    """Return the maximum tokens drafted per step; if `k` is 0 (not set), the method's default.

    Examples
    --------
    >>> effective_k(Method.EAGLE3, 5), effective_k(Method.SUFFIX, 0), effective_k(Method.BASELINE, 0)
    (5, 24, 0)
    """
    return 0 if method is Method.BASELINE else k or _DEFAULT_K.get(method, 3)


@cache
def expected_step(calibration: str, method: Method, k: int) -> StepCost:
    """Return the step cost of a method on the calibration's machine."""
    known = load_calibration(calibration)
    method = _calibrated(calibration, method)
    parameters = EngineParameters.of(known, method, {"num_speculative_tokens": max(1, k)} if k else {})
    verified = 1.0 + _drafted_per_step(draft_profile(known, method, _config(k)), k)
    step, drafting = parameters.step, parameters.drafting
    passes = 0 if k == 0 else 1 if drafting.parallel else k
    share = 1.0 + (drafting.verify_share if k else 0.0)
    return StepCost(
        base_s=share * step.base_s
        + step.overhead_s
        + (step.speculation_overhead_s + drafting.base_s + passes * drafting.per_pass_s if k else 0.0),
        per_request_s=share * (step.per_request_s + step.per_token_above_knee_s * verified)
        + passes * drafting.per_request_s,
        per_context_token_s=share * step.per_context_token_s + passes * drafting.per_context_token_s,
        per_prompt_token_s=share * step.per_token_above_knee_s,
    )


@cache
def expected_tokens_per_step(calibration: str, method: Method, k: int, workload: str, temperature: float) -> float:
    """Return the mean tokens per step of a method, for a workload in `Kind` (any other counts as chat)."""
    if k == 0 or method is Method.BASELINE:
        return 1.0
    known = load_calibration(calibration)
    method = _calibrated(calibration, method)
    kind = workload if workload in set(Kind) else Kind.CHAT
    profile = draft_profile(known, method, _config(k), temperature=temperature, kind=kind)
    if profile.drafted:
        return 1.0 + sum(profile.accepted)
    return 1.0 + float(np.cumprod(np.array(profile.accepted) * profile.factor).sum())


def _drafted_per_step(profile: DraftProfile, k: int) -> float:
    return sum(profile.drafted) if profile.drafted else float(k)


def _config(k: int) -> dict[str, int]:
    return {"num_speculative_tokens": k} if k else {}


def _calibrated(calibration: str, method: Method) -> Method:
    """Return the method itself, or the most similar one for which the calibration has figures."""
    known = load_calibration(calibration)
    tried = set()
    while method not in tried:
        tried.add(method)
        if method in (Method.BASELINE, Method.NGRAM, Method.SUFFIX):
            return method
        entry = known.methods.get(method)
        if entry is not None and (entry.acceptance or entry.acceptance_like):
            return method
        method = _SIMILAR[method]
    raise ValueError(f"calibration {calibration!r} has no figures for {method!s} or a similar method")
