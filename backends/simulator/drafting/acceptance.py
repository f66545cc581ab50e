"""Acceptance of a draft model's drafts, drawn from the calibrated acceptance by position."""

from __future__ import annotations

import numpy as np

from backends.calibration.calibration import Calibration
from backends.calibration.draft_profile import draft_profile
from backends.drafting.script import Steps, plain_steps
from backends.speculation import Method


def model_based_replay(
    rng: np.random.Generator,
    calibration: Calibration,
    method: Method,
    k: int,
    temperature: float,
    kind: str,
    prompt_tokens: int,
    output_tokens: int,
) -> Steps:
    """Draw how many tokens each step of a request emits under a method with a draft model.

    Each output token t has a hardness u_t, uniform in [0, 1). Its draft at position j of a step is accepted if the
    drafts before it were and u_t < a_j. Steps that start at neighboring positions thus agree, as recorded ones do. The
    a_j are the calibration's for the method and the kind of text, and fall with temperature. One shift of their logits,
    drawn once per request, gives the observed spread between requests; others, if calibrated, follow the length of the
    answer so far and the context.
    """
    emitted, drafted = plain_steps(output_tokens)
    if k < 1 or output_tokens < 2:
        return emitted, drafted
    config = {"num_speculative_tokens": k}
    profile = draft_profile(calibration, method, config, temperature=temperature, kind=kind)
    at_zero = np.asarray(profile.accepted)
    starts = np.arange(1, output_tokens)
    shift = np.full((k, len(starts)), profile.request_spread * rng.standard_normal())
    if profile.progress[0]:
        shift += np.interp(starts, *profile.progress)
    if profile.context[0]:
        log = np.log2(prompt_tokens + starts)
        shift += [
            np.interp(log, np.log2(profile.context[0]), column) for column in zip(*profile.context[1], strict=True)
        ]
    odds = (at_zero / (1 - at_zero))[:, None] * np.exp(shift)
    rates = odds / (1 + odds) * profile.factor

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
