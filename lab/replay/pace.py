"""When the requests of a trace leave: at its own pace, or scaled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import numpy as np
import numpy.typing as npt

from backends.validation import UsageError
from lab.trace import TraceRecord

Floats = npt.NDArray[np.float64]


def paced(
    records: Iterable[TraceRecord], rate: float | None, speed: float, seed: int
) -> list[tuple[float, TraceRecord]]:
    """Return the requests with the seconds after the first at which each leaves; ascending.

    Parameters
    ----------
    records
        In order of arrival.
    rate
        Requests per second on average, by which the trace's times are stretched; where it has none, arrivals are drawn,
        exponential. None leaves the times as they are.
    speed
        What they are divided by without a rate.
    seed
        Of arrivals that are drawn.

    Raises
    ------
    UsageError
        If there are none, or the trace has no times and no rate is given.
    """
    kept = list(records)
    arrived_at = np.array([math.nan if record.arrived_at is None else record.arrived_at for record in kept])
    return list(zip(arrivals(arrived_at, rate, speed, seed).tolist(), kept, strict=True))


def arrivals(arrived_at: Floats, rate: float | None, speed: float, seed: int) -> Floats:
    """Return the seconds after the first at which each request leaves; both of shape (requests,).

    Parameters
    ----------
    arrived_at
        By the trace's own clock, ascending; NaN where it does not tell.
    rate, speed, seed
        As `paced` takes them.

    Raises
    ------
    UsageError
        If there are none, or the trace has no times and no rate is given.
    """
    count = len(arrived_at)
    if not count:
        raise UsageError("the trace has no requests")
    first, last = arrived_at[0], arrived_at[-1]
    if np.isnan(first) or np.isnan(last) or (last <= first and count > 1):
        if rate is None:
            raise UsageError("the trace does not tell when requests came; give --rate")
        rng = Random(seed)
        return np.cumsum([rng.expovariate(rate) for _ in range(count)])
    if rate is not None and last > first:
        speed = rate * (last - first) / count
    after_first = np.where(np.isnan(arrived_at), 0.0, arrived_at - first)
    return np.maximum.accumulate(after_first / speed)
