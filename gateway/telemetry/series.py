"""Counters and histograms that are cheap to add to.

A `prometheus_client` counter takes a lock each time, and finding its labels costs twice as much again: with a dozen of
them that is more than all the rest of a request's bookkeeping. Everything on the request path is counted on the event
loop, by one thread: so it is summed up here without a lock, and `flush` hands the sums on.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from prometheus_client import Counter, Histogram


class Count:
    """One series of a counter."""

    __slots__ = ("_amount", "_series")

    def __init__(self, series: Counter) -> None:
        self._series = series
        self._amount = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        self._amount += amount

    def flush(self) -> None:
        """Hand on what was added since the last time."""
        if self._amount:
            self._series.inc(self._amount)
            self._amount = 0.0


class Distribution:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_counts", "_series", "_sum")

    def __init__(self, series: Histogram, bounds: tuple[float, ...]) -> None:
        self._series: Any = series  # its buckets are private, but the way in that is not takes one value at a time
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last one beyond all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Hand on what was added since the last time."""
        if not any(self._counts):
            return
        for bucket, count in zip(self._series._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._series._sum.inc(self._sum)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class Counts:
    """All series of a counter, by the values of its labels."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._series: dict[tuple[str, ...], Count] = {}

    def labels(self, *values: str) -> Count:
        """Return the series with these labels; it exists from then on, at zero."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Count(self._counter.labels(*values))
        return found

    def flush(self) -> None:
        """Hand on what was added since the last time."""
        for series in self._series.values():
            series.flush()


class Distributions:
    """All series of a histogram, by the values of its labels."""

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Distribution] = {}

    def labels(self, *values: str) -> Distribution:
        """Return the series with these labels; it exists from then on, empty."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Distribution(self._histogram.labels(*values), self._bounds)
        return found

    def flush(self) -> None:
        """Hand on what was added since the last time."""
        for series in self._series.values():
            series.flush()
