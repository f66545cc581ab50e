"""When the requests of a trace leave: at its own pace, or scaled."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from policies.trace import TraceRecord


class PaceError(ValueError):
    """A trace that has no requests, or does not tell when they came."""


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
    PaceError
        If there are none, or the trace has no times and no rate is given.
    """
    kept = list(records)
    if not kept:
        raise PaceError("the trace has no requests")
    first, last = kept[0].arrived_at, kept[-1].arrived_at
    if first is None or last is None or (last <= first and len(kept) > 1):
        if rate is None:
            raise PaceError("the trace does not tell when requests came; give --rate")
        return _drawn(kept, rate, seed)
    if rate is not None and last > first:
        speed = rate * (last - first) / len(kept)
    now_s = 0.0
    timed = []
    for record in kept:
        now_s = max(now_s, ((first if record.arrived_at is None else record.arrived_at) - first) / speed)
        timed.append((now_s, record))
    return timed


def _drawn(records: list[TraceRecord], rate: float, seed: int) -> list[tuple[float, TraceRecord]]:
    rng = Random(seed)
    now_s = 0.0
    timed = []
    for record in records:
        now_s += rng.expovariate(rate)
        timed.append((now_s, record))
    return timed
