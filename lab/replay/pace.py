"""Send times of a trace's requests, original or scaled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import numpy as np

from backends.validation import UsageError
from lab.statistics import Floats
from lab.trace.record import TraceRecord


def paced(
    records: Iterable[TraceRecord], rate: float | None, speed: float, seed: int
) -> list[tuple[float, TraceRecord]]:
    """Return the requests with their send times in seconds after the first, ascending.

    Examples
    --------
    >>> records = [TraceRecord(id="a", arrived_at=100.0), TraceRecord(id="b", arrived_at=104.0)]
    >>> [(at_s, record.id) for at_s, record in paced(records, rate=None, speed=2.0, seed=0)]
    [(0.0, 'a'), (2.0, 'b')]
    """
    in_order = list(records)
    arrived_at = np.array([math.nan if record.arrived_at is None else record.arrived_at for record in in_order])
    return list(zip(arrivals(arrived_at, rate, speed, seed).tolist(), in_order, strict=True))


def arrivals(arrived_at: Floats, rate: float | None, speed: float, seed: int) -> Floats:
    """Return the send times of requests in seconds after the first, shape (requests,)."""
    count = len(arrived_at)
    if not count:
        raise UsageError("the trace has no requests")
    first, last = arrived_at[0], arrived_at[-1]
    if np.isnan(first) or np.isnan(last) or (last <= first and count > 1):
        if rate is None:
            missing = int(np.isnan(arrived_at).sum())
            some = f"{missing:,} of {count:,} requests have no arrival time"
            raise UsageError(f"{some if 0 < missing < count else 'the trace has no arrival times'}; give --rate")
        rng = Random(seed)
        return np.cumsum([rng.expovariate(rate) for _ in range(count)])
    if rate is not None and last > first:
        speed = rate * (last - first) / count
    after_first = np.where(np.isnan(arrived_at), 0.0, arrived_at - first)
    return np.maximum.accumulate(after_first / speed)
