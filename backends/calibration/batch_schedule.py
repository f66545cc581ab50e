"""The best k for each batch size, in as few ranges of `num_speculative_tokens_per_batch_size` as possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import StepTime
from backends.calibration.parameters import EngineParameters
from backends.speculation import SCHEDULE_KEY, Method

Floats = npt.NDArray[np.float64]
Range = tuple[int, int, int]
"""`(first, last, k)`: batch sizes, both ends included, and the tokens drafted for them."""

TOLERANCE: Final = 0.001
"""Share of the throughput that merging ranges may cost at a batch size."""

UNSPLIT_ROWS: Final = 64
"""Query rows that FlashAttention 2 computes at once; a verified draft fills few of them."""

SCHEDULED: Final = frozenset({Method.EAGLE, Method.EAGLE3, Method.MTP, Method.DRAFT_MODEL})
"""Methods that can gain from a schedule of k.

The others' drafts cost next to nothing, are only as long as they are likely, or take one pass.
"""


def unsplit_reads(context: Any, longest: Any) -> tuple[Any, Any, Any]:
    """Return how often a step that verifies drafts pays each cost of its context; the longest time counts.

    The costs are `per_context_token_s`, `per_unsplit_token_s` and `per_attended_s` of `StepTime`. Takes arrays; when
    compiled, numbers.
    """
    return context, longest, UNSPLIT_ROWS * context


def tokens_s(step: Any, tokens: Any) -> Any:
    """Return the seconds of a step without those of its requests and their context; see `StepTime`.

    Takes arrays; when compiled, numbers, with the record of a simulated replica as `step`.
    """
    below = np.minimum(tokens, step.knee_tokens)
    return (
        step.base_s
        + step.per_token_below_knee_s * below
        + step.per_token_above_knee_s * (tokens - below)
        + step.experts_s * (1.0 - (1.0 - step.expert_share) ** tokens)
        + step.no_graph_s * ((step.graph_tokens > 0) & (tokens > step.graph_tokens))
    )


def context_s(step: StepTime, context: Floats, longest: Floats | float, *, unsplit: bool) -> Floats:
    """Return the seconds that reading the context in the KV cache takes, shape of `context`; see `StepTime`.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> step = load_calibration("llama-3.1-8b-h100@A100").step
    >>> verifying, plain = (context_s(step, np.array([600.0, 19200.0]), 600.0, unsplit=each) for each in (True, False))
    >>> (1e3 * verifying).round(2).tolist(), (1e3 * plain).round(2).tolist()
    ([0.86, 3.58], [0.04, 1.24])
    """
    if not (unsplit and step.per_unsplit_token_s):
        return step.per_context_token_s * context
    whole, unsplit_tokens, rows = unsplit_reads(context, longest)
    least_s = np.maximum(step.per_unsplit_token_s * unsplit_tokens, step.per_attended_s * rows)
    return np.asarray(np.maximum(step.per_context_token_s * whole, least_s))


def decode_step_s(parameters: EngineParameters, batches: Floats, k: int, context_tokens: float) -> Floats:
    """Return the seconds of steps in which all requests decode and draft k tokens, shape of `batches`.

    The formulas are those of `StepTime` and `Drafting`. A test compares them with the simulated engine.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> config = {"num_speculative_tokens": 3}
    >>> parameters = EngineParameters.of(load_calibration("llama-3.1-8b-h100"), Method.EAGLE3, config)
    >>> (1e3 * decode_step_s(parameters, np.array([1.0, 64.0]), 3, 600.0)).round(2).tolist()
    [9.49, 19.04]
    """
    step, drafting = parameters.step, parameters.drafting
    tokens, context = batches * (1 + k), batches * context_tokens
    verify_s = (
        tokens_s(step, tokens) + step.per_request_s * batches + context_s(step, context, context_tokens, unsplit=k > 0)
    )
    drafting_s: Floats | float = 0.0
    if passes := drafting.passes(max(parameters.least_passes, k)):
        drafting_s = (
            drafting.base_s
            + drafting.verify_share * verify_s
            + passes * (drafting.per_pass_s + drafting.per_request_s * batches + drafting.per_context_token_s * context)
            + step.speculation_overhead_s
        )
    return np.asarray(verify_s + step.overhead_s + drafting_s)


def goodput(
    parameters: EngineParameters, tokens_per_step: Sequence[float], context_tokens: float, longest_batch: int
) -> Floats:
    """Return the tokens per second of each batch size with each k, shape (longest_batch, k + 1)."""
    batches = np.arange(1.0, longest_batch + 1)
    return np.stack(
        [
            batches * tokens / decode_step_s(parameters, batches, k, context_tokens)
            for k, tokens in enumerate(tokens_per_step)
        ],
        axis=1,
    )


def with_ranges(config: Mapping[str, Any], ranges: Sequence[Range]) -> dict[str, Any]:
    """Return a speculative config that drafts by these ranges; a single range needs no schedule.

    Examples
    --------
    >>> with_ranges({"model": "a-head", "num_speculative_tokens": 5}, [(1, 256, 1)])
    {'model': 'a-head', 'num_speculative_tokens': 1}
    """
    fixed = {**config, "num_speculative_tokens": max(k for *_, k in ranges)}
    fixed.pop(SCHEDULE_KEY, None)
    return fixed if len(ranges) == 1 else {**fixed, SCHEDULE_KEY: [list(each) for each in ranges]}


def ranges_of(goodput: Floats, tolerance: float = TOLERANCE) -> list[Range]:
    """Return the fewest ranges of batch sizes in which each k is the best one, or nearly so.

    A k suits a batch size if it loses at most `tolerance` there and differs from the best k by at most 1. Of the
    schedules with the fewest ranges, the one with the least loss wins. Uses dynamic programming over batch sizes.

    Examples
    --------
    >>> ranges_of(np.array([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [3.0, 3.5, 2.0]]))
    [(1, 2, 2), (3, 3, 1)]
    """
    best = goodput.argmax(axis=1)
    loss = 1.0 - goodput / goodput.max(axis=1, keepdims=True)
    ks = np.arange(goodput.shape[1])
    loss[(loss > tolerance) | (np.abs(ks - best[:, None]) > 1)] = math.inf
    # Weight batch sizes logarithmically: 1 to 2 counts as much as 128 to 256.
    loss *= np.log1p(1.0 / np.arange(1.0, len(loss) + 1))[:, None]
    cost = np.where(np.isinf(loss[0]), math.inf, 1.0 + loss[0] / _FEWEST)
    came_from = np.empty(loss.shape, np.int64)
    for batch in range(1, len(loss)):
        cheapest = int(cost.argmin())
        switches = cost[cheapest] + 1.0 < cost
        came_from[batch] = np.where(switches, cheapest, ks)
        cost = np.where(switches, cost[cheapest] + 1.0, cost) + loss[batch] / _FEWEST
    chosen = [int(cost.argmin())]
    for batch in range(len(loss) - 1, 0, -1):
        chosen.append(int(came_from[batch, chosen[-1]]))
    return _merged(chosen[::-1])


_FEWEST: Final = 100.0
"""Cost of a range, more than all losses together: log(longest batch) is far less than this."""


def _merged(chosen: Sequence[int]) -> list[Range]:
    ranges: list[Range] = []
    for batch, k in enumerate(chosen, 1):
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], batch, k)
        else:
            ranges.append((batch, batch, k))
    return ranges
