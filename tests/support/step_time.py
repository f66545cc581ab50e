"""Made-up parameters of the time of a step, and the formula of docs/simulator.md for it."""

from __future__ import annotations

from backends.calibration.calibration import Drafting, StepTime
from backends.calibration.parameters import EngineParameters

STEP = StepTime(
    base_s=5e-3,
    knee_tokens=20,
    per_token_below_knee_s=1e-6,
    per_token_above_knee_s=2e-5,
    per_context_token_s=4e-8,
    overhead_s=1e-3,
    speculation_overhead_s=5e-4,
    source="made up",
)
DRAFTING = Drafting(
    base_s=1e-4, per_pass_s=6e-4, per_request_s=1e-6, per_context_token_s=1e-9, verify_share=0.01, source="made up"
)
PLAIN = EngineParameters(step=STEP, drafting=Drafting(source="none"))


def step_s(
    parameters: EngineParameters, tokens: int, context_tokens: int, k: int, requests: int, *, drafted: bool
) -> float:
    """Return the seconds of a step.

    Parameters
    ----------
    k
        Tokens drafted for each request.
    requests
        Those that get tokens.
    drafted
        Whether a draft is verified.
    """
    step, drafting = parameters.step, parameters.drafting
    below = min(tokens, step.knee_tokens)
    verify_s = step.base_s + step.per_token_below_knee_s * below + step.per_token_above_knee_s * (tokens - below)
    verify_s += step.per_request_s * requests + step.per_context_token_s * context_tokens
    if 0 < step.graph_tokens < tokens:
        verify_s += step.no_graph_s
    drafting_s = 0.0
    passes = max(parameters.least_passes, k)
    if passes and requests:
        pass_s = drafting.per_pass_s + drafting.per_request_s * requests + drafting.per_context_token_s * context_tokens
        drafting_s = drafting.base_s + drafting.verify_share * verify_s + drafting.passes(passes) * pass_s
    speculation_s = step.speculation_overhead_s if drafting_s or drafted else 0.0
    return verify_s + drafting_s + step.overhead_s + speculation_s
