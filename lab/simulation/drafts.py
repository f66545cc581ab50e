"""Acceptance of a method's drafts on a trace's requests, and the schedule of k by batch size that suits them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backends.calibration.batch_schedule import SCHEDULED, TOLERANCE, Range, goodput, ranges_of
from backends.calibration.calibration import Calibration
from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import draft_tokens
from backends.simulator.drafting.acceptance import model_based_replay
from backends.speculation import SCHEDULE_KEY, Method
from lab.simulation.request import ReplayRequest
from policies.learned.shadow_drafting import steps_of

MOST_REQUESTS: Final = 400
"""Requests to examine, spread evenly over those given."""


def tokens_per_step(
    calibration: Calibration, method: Method, config: Mapping[str, Any], requests: Sequence[ReplayRequest]
) -> tuple[float, ...]:
    """Return the mean tokens per step of a method on requests with drafts of 0, 1, ..., k tokens, shape (k + 1,).

    k is `num_speculative_tokens`. Steps that the trace records or its texts determine count as each k would take them.
    For other requests, steps are drawn from the calibration by kind of text and temperature.
    """
    if not len(requests):
        raise ValueError("there are no requests to take the acceptance from")
    k = draft_tokens(method, config)
    tokens = 0
    steps = np.zeros(k + 1, np.int64)
    for number in range(0, len(requests), math.ceil(len(requests) / MOST_REQUESTS)):
        emitted = _emitted(calibration, method, k, config, requests[number], number)
        tokens += len(emitted) - 1
        steps += [steps_of(np.minimum(emitted, longest + 1)) - 1 for longest in range(k + 1)]
    per_step = np.maximum.accumulate(tokens / np.maximum(1, steps))
    return tuple(np.cumsum([1.0, *np.diff(per_step)]).round(12).tolist())


def mean_context_tokens(requests: Sequence[ReplayRequest]) -> float:
    """Return the mean context of a request in a batch: its prompt and half its output, weighted by output length."""
    weighted = output = 0.0
    for number in range(0, len(requests), math.ceil(len(requests) / (10 * MOST_REQUESTS))):
        request = requests[number]
        weighted += request.output_tokens * (request.prompt_tokens + request.output_tokens / 2)
        output += request.output_tokens
    return weighted / output


def _emitted(
    calibration: Calibration, method: Method, k: int, config: Mapping[str, Any], request: ReplayRequest, number: int
) -> npt.NDArray[np.int32]:
    """Return the tokens that a step of k drafts emits at each output position."""
    known = request.script(method, k, config)
    if known is not None:
        return known.emitted
    features = request.features
    drawn, _ = model_based_replay(
        np.random.default_rng(number),
        calibration,
        method,
        k,
        features.temperature,
        features.workload or "chat",
        request.prompt_tokens,
        request.output_tokens,
    )
    return drawn


def best_schedule(
    calibration: Calibration,
    method: Method,
    config: Mapping[str, Any],
    tokens_per_step: Sequence[float],
    context_tokens: float,
    longest_batch: int,
) -> list[Range]:
    """Return the ranges `(first, last, k)` of batch sizes with the most tokens per second, in vLLM's format.

    Empty if the config's k is as good at every batch size, and for methods that gain nothing from a schedule. If
    drafting never pays, return one range with k=1, the least that an engine accepts.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> calibration, config = load_calibration("llama-3.1-8b-h100"), {"num_speculative_tokens": 5}
    >>> best_schedule(calibration, Method.EAGLE3, config, (1.0, 1.7, 2.2, 2.55, 2.8, 2.98), 300.0, 256)
    [(1, 6, 5), (7, 24, 4), (25, 67, 3), (68, 256, 2)]
    """
    if method not in SCHEDULED:
        return []
    fixed = {key: value for key, value in config.items() if key != SCHEDULE_KEY}
    parameters = EngineParameters.of(calibration, method, fixed)
    per_step = tokens_per_step[: parameters.k + 1]
    ranges = ranges_of(goodput(parameters, per_step, context_tokens, longest_batch), TOLERANCE)
    if len(ranges) > 1:
        return ranges
    k = max(1, ranges[0][2])
    return [] if k == parameters.k else [(1, longest_batch, k)]
