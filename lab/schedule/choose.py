"""The schedule of k by batch size with the most tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.calibration.batch_schedule import SCHEDULED, TOLERANCE, Range, goodput, ranges_of
from backends.calibration.calibration import Calibration
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from lab.schedule.drafts import Drafts


def best_schedule(
    calibration: Calibration,
    method: Method,
    config: Mapping[str, Any],
    drafts: Drafts,
    context_tokens: float,
    longest_batch: int,
    *,
    tolerance: float = TOLERANCE,
) -> list[Range]:
    """Return the ranges `[first, last, k]` of batch sizes with the most tokens per second, as vLLM takes them.

    Empty if one k is as good at every batch size, and for methods that gain nothing by a schedule
    (`backends.calibration.batch_schedule.why_unscheduled`).

    Parameters
    ----------
    config
        Speculative config, whose `num_speculative_tokens` is the longest draft considered.
    context_tokens
        Mean context of a request in a batch.
    longest_batch
        Largest batch: `max_num_seqs`.
    tolerance
        Share of the throughput that merging ranges may cost at a batch size.

    Examples
    --------
    >>> from backends.calibration.calibration import load_calibration
    >>> calibration, config = load_calibration("llama-3.1-8b-h100"), {"num_speculative_tokens": 5}
    >>> drafts = Drafts((0.7, 0.5, 0.35, 0.25, 0.18))
    >>> best_schedule(calibration, Method.EAGLE3, config, drafts, 300.0, 256)
    [(1, 15, 4), (16, 65, 3), (66, 256, 2)]
    """
    if method not in SCHEDULED:
        return []
    fixed = {key: value for key, value in config.items() if key != "num_speculative_tokens_per_batch_size"}
    parameters = EngineParameters.of(calibration, method, fixed)
    tokens_per_step = drafts.tokens_per_step[: parameters.k + 1]
    ranges = ranges_of(goodput(parameters, tokens_per_step, context_tokens, longest_batch), tolerance)
    return ranges if len(ranges) > 1 else []
