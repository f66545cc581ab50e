"""Windows of traffic, spread evenly over a trace of any length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lab.replay.pace import arrivals
from lab.simulation.request import ReplayRequest
from lab.simulation.table import RequestTable
from lab.statistics import Floats

Windows = tuple[tuple[ReplayRequest, ...], ...]
"""Windows in order of time, each with its requests in order of arrival."""

WINDOWS = 19
"""Largest number of windows."""

SHORTEST, PER_REPLICA = 500, 125
"""Least requests in a window, in total and per replica."""

_FEWEST = 7


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """A sample of a trace."""

    windows: Windows
    requests: int  # requests in the trace that the target can serve
    left_out: int  # the others, which are longer than its context
    assumed: tuple[str, ...] = ()  # assumptions about what the trace does not say

    def __str__(self) -> str:
        """Return what was sampled, in words."""
        count = sum(map(len, self.windows))
        text = f"{count:,} requests in {len(self.windows)} windows"
        text += f", spread evenly over {self.requests:,}" if count < self.requests else ""
        text += f"; {self.left_out:,} left out, longer than the target's context" if self.left_out else ""
        return " ".join([f"{text}.", *self.assumed])


def sample(
    requests: RequestTable,
    replicas: int,
    max_model_len: int,
    *,
    limit: int | None = None,
    rate: float | None = None,
    speed: float = 1.0,
) -> TrafficSample:
    """Take windows of the requests in a trace that fit into a context."""
    table = requests[requests.tokens <= max_model_len]
    parts = evenly(len(table), *_size(replicas, limit))
    if table.order.is_open:
        windows = [_placed(table[part], table.arrived_at, rate, speed, at) for at, part in enumerate(parts)]
    else:
        table = table.in_sessions(rate, speed, 1, 0)
        windows = [list(table[part]) for part in parts]
    return TrafficSample(tuple(map(tuple, windows)), len(table), len(requests) - len(table), (*table.assumed,))


def _placed(window: RequestTable, trace_s: Floats, rate: float | None, speed: float, seed: int) -> list[ReplayRequest]:
    """Return the requests of a window with their arrival times, at the rate of the whole trace or another."""
    span_s = trace_s[-1] - trace_s[0]
    if span_s > 0:
        speed = speed if rate is None else rate * span_s / len(trace_s)
        at_s = (window.arrived_at - window.arrived_at[0]) / speed
    else:
        at_s = arrivals(np.full(len(window), math.nan), rate, speed, seed)
    return list(window.paced(at_s))


def _size(replicas: int, limit: int | None) -> tuple[int, int]:
    """Return the requests per window, and the largest number of windows."""
    length = max(SHORTEST, PER_REPLICA * replicas)
    if limit is None:
        return length, WINDOWS
    length = min(length, max(1, limit // _FEWEST))
    return length, max(1, min(WINDOWS, limit // length))


def evenly(count: int, length: int, most: int = WINDOWS) -> list[slice]:
    """Return up to `most` windows of `length` requests at equal distances; cut few requests into equal windows.

    Examples
    --------
    >>> [window.start for window in evenly(100_000, 500)][:4]
    [0, 5528, 11056, 16583]
    """
    if count < 2 * _FEWEST:
        raise ValueError(f"{count} requests are too few to plan on")
    if count < most * length:
        cuts = np.linspace(0, count, max(_FEWEST, count // length) + 1).astype(int).tolist()
        return [slice(start, end) for start, end in pairwise(cuts)]
    starts = np.linspace(0, count - length, most).round().astype(int).tolist()
    return [slice(start, start + length) for start in starts]


def one_after_another(windows: Sequence[Sequence[ReplayRequest]]) -> list[ReplayRequest]:
    """Return the requests of windows on one clock, at their rate throughout; sessions end with their window."""
    placed: list[ReplayRequest] = []
    next_s = 0.0
    for number, window in enumerate(windows):
        first_s, last_s = window[0].arrived_s, window[-1].arrived_s
        placed += [
            replace(one, arrived_s=next_s + one.arrived_s - first_s, session=one.session and f"{one.session}/{number}")
            for one in window
        ]
        next_s += (last_s - first_s) * len(window) / max(1, len(window) - 1)
    return placed
