"""The formula of docs/simulator.md for the time of a step."""

from __future__ import annotations

from backends.calibration.parameters import EngineParameters


def step_s(
    parameters: EngineParameters, tokens: int, context_tokens: int, k: int, requests: int, *, drafted: bool
) -> float:
    """Return the seconds of a step.

    Parameters
    ----------
    requests
        Those that get tokens.
    drafted
        Whether a draft is verified.
    """
    step, drafting = parameters.step, parameters.drafting
    below = min(tokens, step.knee_tokens)
    verify_s = step.base_s + step.per_token_below_knee_s * below + step.per_token_above_knee_s * (tokens - below)
    verify_s += step.per_context_token_s * context_tokens
    drafting_s = 0.0
    if k and requests:
        pass_s = drafting.per_pass_s + drafting.per_request_s * requests + drafting.per_context_token_s * context_tokens
        passes = 1 if drafting.parallel else k
        drafting_s = drafting.base_s + drafting.verify_share * verify_s + passes * pass_s
    speculation_s = step.speculation_overhead_s if drafting_s or drafted else 0.0
    return verify_s + drafting_s + step.overhead_s + speculation_s
