"""Windows of traffic, spread evenly over requests of any number, and the groups that requests belong to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from lab.replay.pace import arrivals
from lab.replay.request import ReplayRequest, replay_request
from lab.trace import TraceRecord
from policies.features.request import Endpoint, RequestFeatures

Item = TypeVar("Item")

Windows = tuple[tuple[ReplayRequest, ...], ...]
"""Windows in order of time, each with its requests in order of arrival; the clock goes on from one to the next."""

WINDOWS = 19
"""Largest number of windows."""

SHORTEST, PER_REPLICA = 500, 125
"""Requests in a window at least, and for each replica: enough for several generations of a full batch."""

_FEWEST = 7
_PAUSE_S = 10.0
_CODE = 0.3  # share of code from which the text of a request is called code


@dataclass(frozen=True, slots=True)
class Traffic:
    """A sample of a trace."""

    windows: Windows
    requests: int  # number of requests in the trace that the target can serve
    left_out: int  # number of the others: longer than the target's context, or not for inference

    def __str__(self) -> str:
        """Return what was sampled, in words."""
        count = sum(map(len, self.windows))
        text = f"{count:,} requests in {len(self.windows)} windows"
        text += f", spread evenly over {self.requests:,}" if count < self.requests else ""
        return text + (f"; {self.left_out:,} left out, longer than the target's context" if self.left_out else "")


def sample(
    records: Iterable[TraceRecord],
    replicas: int,
    max_model_len: int,
    temperature: float,
    *,
    limit: int | None = None,
    rate: float | None = None,
    speed: float = 1.0,
) -> Traffic:
    """Take windows of a trace; memory does not grow with its length."""
    left_out = 0
    first_s = last_s = math.nan

    def fitting() -> Iterable[TraceRecord]:
        nonlocal left_out, first_s, last_s
        for record in records:
            size = record.prompt_tokens + max(1, record.output_tokens or 1)
            if record.endpoint == Endpoint.OTHER or size > max_model_len:
                left_out += 1
                continue
            if record.arrived_at is not None:
                first_s = record.arrived_at if math.isnan(first_s) else first_s
                last_s = record.arrived_at
            yield record

    windows, count = evenly(fitting(), *_size(replicas, limit))
    has_times = windows[0][0].arrived_at is not None and last_s > first_s
    if rate is not None and has_times:
        speed = rate * (last_s - first_s) / count
    prepared = []
    for number, window in enumerate(windows):
        if has_times:
            times = np.array([record.arrived_at for record in window], np.float64)
            at_s = (times - times[0]) / speed
        else:
            at_s = arrivals(np.full(len(window), math.nan), rate, speed, seed=number)
        pairs = zip(window, at_s.tolist(), strict=True)
        prepared.append([replay_request(record, arrived_s, temperature) for record, arrived_s in pairs])
    return Traffic(one_after_another(prepared), count, left_out)


def _size(replicas: int, limit: int | None) -> tuple[int, int]:
    """Return the requests in a window, and the largest number of windows."""
    length = max(SHORTEST, PER_REPLICA * replicas)
    if limit is None:
        return length, WINDOWS
    length = min(length, max(1, limit // _FEWEST))
    return length, max(1, min(WINDOWS, limit // length))


def evenly(requests: Iterable[Item], length: int, most: int = WINDOWS) -> tuple[list[list[Item]], int]:
    """Return up to `most` windows of `length` requests at nearly equal distances, and the number of all requests.

    At most four times as many windows are held: whenever there are more, every second one is dropped, and from then on
    only half as many are taken. Few requests are cut into equal windows.

    Examples
    --------
    >>> windows, count = evenly(range(100_000), 500)
    >>> len(windows), count, [window[0] for window in windows][:4]
    (19, 100000, [0, 6000, 10000, 16000])
    """
    windows: list[list[Item]] = []
    stride, count = 1, 0
    for count, request in enumerate(requests, 1):
        number, at = divmod(count - 1, length)
        if number % stride:
            continue
        if at == 0:
            if len(windows) == 4 * most:
                windows, stride = windows[::2], 2 * stride
            windows.append([])
        windows[-1].append(request)
    if count < 2 * _FEWEST:
        raise ValueError(f"{count} requests are too few to plan on")
    if count < most * length:
        held = [request for window in windows for request in window]
        cuts = np.linspace(0, count, max(_FEWEST, count // length) + 1).astype(int)
        return [held[start:end] for start, end in pairwise(cuts)], count
    if len(windows[-1]) < length:
        windows.pop()
    taken = np.linspace(0, len(windows) - 1, min(most, len(windows))).round().astype(int)
    return [windows[index] for index in taken], count


def one_after_another(windows: Sequence[Sequence[ReplayRequest]]) -> Windows:
    """Return windows whose times go on from one to the next, so that a policy that learns sees one clock."""
    placed, next_s = [], 0.0
    for window in windows:
        shift_s = next_s - window[0].arrived_s
        placed.append(tuple(replace(request, arrived_s=request.arrived_s + shift_s) for request in window))
        next_s = placed[-1][-1].arrived_s + _PAUSE_S
    return tuple(placed)


def group_of(features: RequestFeatures) -> str:
    """Return the group of a request: its declared workload, else whether its text is code.

    Examples
    --------
    >>> from policies.features.request import ANY_REQUEST
    >>> group_of(ANY_REQUEST)
    'undeclared text'
    """
    if features.workload:
        return features.workload
    return "undeclared code" if features.code_share >= _CODE else "undeclared text"
