"""Acceptance of a method's drafts on the requests of a trace, or as an engine counted it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from backends.calibration.calibration import Calibration
from backends.draft_schedule import draft_tokens
from backends.simulator.drafting.acceptance import model_based_replay
from backends.speculation import Method
from lab.replay.request import ReplayRequest

MOST_REQUESTS: Final = 400
"""Requests that are looked at, spread evenly over those given."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Acceptance of the drafts of one method on given traffic.

    Examples
    --------
    >>> Drafts((0.7, 0.4)).tokens_per_step
    (1.0, 1.7, 2.1)
    """

    # `accepted[j]` is the tokens that a draft of j + 1 tokens adds to a step over one of j tokens: the share of steps
    # in which at least j + 1 drafts are accepted; shape (k,).
    accepted: tuple[float, ...]

    @property
    def k(self) -> int:
        """The longest draft whose acceptance is known."""
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> tuple[float, ...]:
        """Mean tokens per step with drafts of 0, 1, ..., k tokens, shape (k + 1,)."""
        return tuple(float(tokens) for tokens in np.cumsum([1.0, *self.accepted]).round(12))

    @classmethod
    def counted(cls, drafts: int, accepted_per_position: Sequence[int]) -> Drafts:
        """Return what an engine counted.

        Examples
        --------
        >>> Drafts.counted(10, [7, 4]).accepted
        (0.7, 0.4)
        """
        return cls(tuple(count / drafts for count in accepted_per_position))


def drafts_of(
    calibration: Calibration, method: Method, config: Mapping[str, Any], requests: Sequence[ReplayRequest]
) -> Drafts:
    """Return the acceptance of a method on requests, for drafts of up to `num_speculative_tokens`.

    Steps that the trace records, or that its texts determine, are counted as they would be taken with each k. For
    other requests they are drawn from the calibration, by kind of text and temperature.
    """
    if not len(requests):
        raise ValueError("there are no requests to take the acceptance from")
    k = draft_tokens(method, config)
    tokens = 0
    steps = np.zeros(k + 1, np.int64)
    for number in range(0, len(requests), math.ceil(len(requests) / MOST_REQUESTS)):
        emitted = _emitted(calibration, method, k, config, requests[number], number)
        tokens += len(emitted) - 1
        steps += [_steps(emitted, longest + 1) for longest in range(k + 1)]
    per_step = np.maximum.accumulate(tokens / np.maximum(1, steps))
    return Drafts(tuple(np.diff(per_step).tolist()))


def mean_context_tokens(requests: Sequence[ReplayRequest]) -> float:
    """Return the mean context of a request in a batch: half of its output is there on average, for as many steps."""
    weighted = output = 0.0
    for number in range(0, len(requests), math.ceil(len(requests) / (10 * MOST_REQUESTS))):
        request = requests[number]
        weighted += request.output_tokens * (request.prompt_tokens + request.output_tokens / 2)
        output += request.output_tokens
    return weighted / output


def _emitted(
    calibration: Calibration, method: Method, k: int, config: Mapping[str, Any], request: ReplayRequest, number: int
) -> list[int]:
    """Return the tokens that a step of k drafts emits at each output position."""
    known = request.script(method, k, config)
    if known is not None:
        return list(map(int, known.emitted))
    features = request.features
    drawn, _ = model_based_replay(
        np.random.default_rng(number),
        calibration,
        method,
        k,
        features.temperature,
        features.workload or "chat",
        request.output_tokens,
    )
    return list(map(int, drawn))


def _steps(emitted: Sequence[int], most: int) -> int:
    """Return the steps after the first token, of at most `most` tokens each."""
    position, steps = 1, 0
    while position < len(emitted):
        position += min(emitted[position], most)
        steps += 1
    return steps
