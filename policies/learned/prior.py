"""Prior expectations of a backend without observations, from the simulator's calibrations."""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from backends.calibration.batch_schedule import context_s
from backends.calibration.calibration import Kind
from backends.calibration.draft_profile import DraftProfile, draft_profile
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import DraftSchedule
from backends.speculation import MODELLESS, Method

DEFAULT_CALIBRATION = "llama-3.1-8b-h100"

_CONTEXT_TOKENS = 600
"""Assumed context at which adaptive verification weighs tokens against seconds."""

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
    """Seconds of one engine step, as a linear function of its load."""

    base_s: float  # seconds with an empty batch
    per_request_s: float  # seconds per request in the batch, for verifying and drafting its tokens
    per_context_token_s: float  # seconds per context token of those requests
    per_prompt_token_s: float  # seconds per prompt token that the step computes


@cache
def expected_step(
    calibration: str, method: Method, k: int, verified_drafts: int | None = None, most_k: int = 0
) -> StepCost:
    """Return the step cost of a method on the calibration's machine; `most_k` is the largest k of its schedule."""
    known = load_calibration(calibration)
    method = _calibrated(calibration, method) if k or most_k else Method.BASELINE
    parameters = EngineParameters.of(known, method, _config(max(k, most_k)))
    drafted = _drafted_per_step(draft_profile(known, method, _config(k)), k) if k else 0.0
    verified = 1.0 + (drafted if verified_drafts is None else verified_drafts)
    step, drafting = parameters.step, parameters.drafting
    passes = drafting.passes(max(k, parameters.least_passes if most_k else 0))  # a drafter runs for k = 0 too
    share = 1.0 + (drafting.verify_share if passes else 0.0)
    return StepCost(
        base_s=share * (step.base_s + step.experts_s)
        + step.overhead_s
        + (step.speculation_overhead_s + drafting.base_s + passes * drafting.per_pass_s if passes else 0.0),
        per_request_s=share * (step.per_request_s + step.per_token_above_knee_s * verified)
        + passes * drafting.per_request_s,
        per_context_token_s=share * float(context_s(step, np.ones(1), 0.0, unsplit=verified > 1.0)[0])
        + passes * drafting.per_context_token_s,
        per_prompt_token_s=share * step.per_token_above_knee_s,
    )


@cache
def attention_share(calibration: str) -> float:
    """Return the share of a prompt token's time that each earlier token adds."""
    step = load_calibration(calibration).step
    return step.per_attended_s / step.per_token_above_knee_s if step.per_token_above_knee_s else 0.0


@cache
def adaptive_schedule(calibration: str, method: Method, drafts: DraftSchedule) -> DraftSchedule:
    """Return how many drafts an engine with adaptive verification verifies, as a schedule.

    It verifies the number with the most expected tokens per second, by step times measured at its start. Here all
    requests of a batch have the same number, in chat at temperature 0.
    """
    tokens = [math.exp(log) for log in expected_by_k(calibration, method, drafts.k, Kind.CHAT, 0.0)]
    costs = [expected_step(calibration, method, drafts.k, verified) for verified in range(drafts.k + 1)]
    best = []
    for batch in range(load_calibration(calibration).scheduler.max_num_seqs + 1):
        rates = [
            gained / (cost.base_s + batch * (cost.per_request_s + cost.per_context_token_s * _CONTEXT_TOKENS))
            for gained, cost in zip(tokens[: drafts.at(batch) + 1], costs, strict=False)
        ]
        best.append(rates.index(max(rates)))
    return DraftSchedule(drafts.k, tuple(best), adaptive=True)


Text = int
"""The bin of a text's mean context, its temperature in twentieths, and the number of its kind, as one number."""


def text_of(workload: str, temperature: float, context_tokens: float) -> Text:
    """Return what acceptance depends on; it has few values, whatever clients send.

    The workload is one of `Kind`; any other counts as chat.
    """
    twentieths = round(_PER_DEGREE * min(temperature, _HOTTEST))
    return (context_bin(context_tokens) * _TEMPERATURES + twentieths) * len(_KINDS) + _NUMBERS.get(workload, _CHAT)


def expected_by_k(
    calibration: str, method: Method, k: int, workload: str, temperature: float, context_tokens: float = 0.0
) -> tuple[float, ...]:
    """Return the logarithm of the mean tokens per step at each k from 0 to `k`, at a mean context."""
    return expected_of(calibration, method, k, text_of(workload, temperature, context_tokens))


def context_bin(tokens: float) -> int:
    """Return the bin of a context, half an octave wide: acceptance hardly changes between neighbors."""
    return int(_BINS_PER_E * math.log(min(tokens, _LONGEST_TOKENS))) if tokens > _SHORTEST_TOKENS else _SHORTEST


@cache
def known_to_tokens(calibration: str, method: Method) -> float:
    """Return the longest context at which the calibration knows the acceptance of a method."""
    method = _calibrated(calibration, method)
    if method in MODELLESS:  # they draft from the text
        return math.inf
    context = load_calibration(calibration).methods[method].context
    return float(context.known_to_tokens) if context is not None else _MEASURED_TOKENS


@cache
def expected_of(calibration: str, method: Method, k: int, text: Text) -> tuple[float, ...]:
    """Return the result of `expected_by_k` for a text."""
    rest, number = divmod(text, len(_KINDS))
    context, twentieths = divmod(rest, _TEMPERATURES)
    temperature = twentieths / _PER_DEGREE
    if k == 0 or method is Method.BASELINE:
        return (0.0,)
    known = load_calibration(calibration)
    method = _calibrated(calibration, method)
    profile = draft_profile(known, method, _config(k), temperature=temperature, kind=_KINDS[number])
    accepted = np.array(profile.accepted)
    if profile.context[0]:
        log = (context + 0.5) / 2
        knots = np.log2(profile.context[0])
        odds = np.exp([np.interp(log, knots, shifts) for shifts in zip(*profile.context[1], strict=True)])
        accepted = accepted * odds / (1.0 - accepted + accepted * odds)
    survival = accepted if profile.drafted else np.cumprod(accepted * profile.factor)
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(survival)])
    return tuple(np.log(tokens).tolist())


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
        if method in MODELLESS:
            return method
        entry = known.methods.get(method)
        if entry is not None and (entry.acceptance or entry.acceptance_like):
            return method
        method = _SIMILAR[method]
    raise ValueError(f"calibration {calibration!r} has no figures for {method!s} or a similar method")


_KINDS: Final = tuple(Kind)
_NUMBERS: Final = {kind.value: number for number, kind in enumerate(_KINDS)}
_CHAT: Final = _NUMBERS[Kind.CHAT]
_PER_DEGREE: Final = 20.0
_HOTTEST: Final = 2.0
_TEMPERATURES: Final = 41
_BINS_PER_E: Final = 2.0 / math.log(2.0)
_SHORTEST: Final = 16
_SHORTEST_TOKENS: Final = 256.0
_LONGEST_TOKENS: Final = 2.0**20
_MEASURED_TOKENS: Final = 2048.0
"""Longest context at which acceptance was measured, if none is given."""
