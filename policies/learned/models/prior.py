"""What is expected of a backend before it has been seen: the figures that the simulator is calibrated with."""

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
"""At which a share of the verification is turned into a time."""

_LIKE = {
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
"""Where a calibration has no figures for a method, it is taken for its nearest kin."""


class StepCost(NamedTuple):
    """Time of one engine step, linear in its load.

    Parameters
    ----------
    base_s
        With an empty batch.
    per_request_s
        For each request in the batch: the tokens verified and drafted for it.
    per_context_token_s
        For each token of context that those requests have.
    per_prompt_token_s
        For each prompt token that the step computes.
    """

    base_s: float
    per_request_s: float
    per_context_token_s: float
    per_prompt_token_s: float

    def scaled(self, factor: float) -> StepCost:
        """Return the costs of an engine that takes `factor` times as long."""
        return StepCost(
            factor * self.base_s,
            factor * self.per_request_s,
            factor * self.per_context_token_s,
            factor * self.per_prompt_token_s,
        )


USUAL_K = {Method.SUFFIX: 24}
"""Drafted tokens of a backend that does not say; 3 for any other method that speculates."""


def known_k(method: Method, k: int) -> int:
    """Return the drafted tokens of a backend, the usual ones where it does not say."""
    return 0 if method is Method.BASELINE else k or USUAL_K.get(method, 3)


@cache
def expected_step(calibration: str, method: Method, k: int) -> StepCost:
    """Return the step time of a method on the calibration's machine."""
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
        per_request_s=share * step.per_token_above_knee_s * verified + passes * drafting.per_request_s,
        per_context_token_s=share * step.per_context_token_s + passes * drafting.per_context_token_s,
        per_prompt_token_s=share * step.per_token_above_knee_s,
    )


@cache
def expected_tokens_per_step(calibration: str, method: Method, k: int, workload: str, temperature: float) -> float:
    """Return the mean tokens of a step, for a workload that is one of `Kind` (any other counts as chat)."""
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
    """Return the method itself or its nearest kin with figures of its own."""
    known = load_calibration(calibration)
    tried = set()
    while method not in tried:
        tried.add(method)
        if method in (Method.BASELINE, Method.NGRAM, Method.SUFFIX):
            return method
        entry = known.methods.get(method)
        if entry is not None and (entry.acceptance or entry.acceptance_like):
            return method
        method = _LIKE[method]
    raise ValueError(f"calibration {calibration!r} has no model-based method to take the place of {method!s}")
