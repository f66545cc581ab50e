"""The schedule of k by batch size with the most tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.calibration.batch_schedule import SCHEDULE_KEY, SCHEDULED, TOLERANCE, Floats, Range, goodput, ranges_of
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
    ranges = ranges_of(goodput_of(calibration, method, config, drafts, context_tokens, longest_batch), tolerance)
    return ranges if len(ranges) > 1 else []


def goodput_of(
    calibration: Calibration,
    method: Method,
    config: Mapping[str, Any],
    drafts: Drafts,
    context_tokens: float,
    longest_batch: int,
) -> Floats:
    """Return the tokens per second of each batch size with each k, shape (longest_batch, k + 1)."""
    fixed = {key: value for key, value in config.items() if key != SCHEDULE_KEY}
    parameters = EngineParameters.of(calibration, method, fixed)
    return goodput(parameters, drafts.tokens_per_step[: parameters.k + 1], context_tokens, longest_batch)
