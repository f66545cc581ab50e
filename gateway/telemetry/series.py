"""Counters and histograms that are cheap to update.

A `prometheus_client` counter takes a lock on each update, and looking up its labels costs twice as much again; for a
dozen counters that exceeds all other bookkeeping of a request. The request path runs in one thread, the event loop's:
its updates are summed here without locks, and `flush` adds the sums to `prometheus_client`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram


class Count:
    """One series of a counter.

    Examples
    --------
    >>> series = Counter("requests", "Requests", registry=None)
    >>> count = Count(series)
    >>> count.inc()
    >>> count.inc(2.0)
    >>> count.flush()
    >>> series.collect()[0].samples[0].value
    3.0
    """

    def __init__(self, series: Counter) -> None:
        self._series = series
        self._amount = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add an amount."""
        self._amount += amount

    def flush(self) -> None:
        """Add the updates since the last flush to `prometheus_client`."""
        if self._amount:
            self._series.inc(self._amount)
            self._amount = 0.0


class Distribution:
    """One series of a histogram."""

    def __init__(self, series: Histogram, bounds: tuple[float, ...]) -> None:
        self._series: Any = series  # Any: `flush` adds to its private buckets; the public method adds single values
        self._bounds = bounds  # upper bounds of its buckets, ascending, without infinity
        self._counts = [0] * (len(bounds) + 1)  # the last one is for values beyond all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Add the updates since the last flush to `prometheus_client`."""
        if not any(self._counts):
            return
        for bucket, count in zip(self._series._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._series._sum.inc(self._sum)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class Counts:
    """All series of a counter, by label values.

    Examples
    --------
    >>> counts = Counts(Counter("requests", "Requests", ("model",), registry=None))
    >>> counts.labels("llama") is counts.labels("llama")
    True
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._series: dict[tuple[str, ...], Count] = {}

    def labels(self, *values: str) -> Count:
        """Return the series with these label values; created at zero if new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Count(self._counter.labels(*values))
        return series

    def forget(self, labels: Mapping[str, str]) -> None:
        """Remove the series with these label values."""
        for values in forget_series(self._counter, labels):
            self._series.pop(values, None)

    def flush(self) -> None:
        """Add the updates since the last flush to `prometheus_client`."""
        for series in self._series.values():
            series.flush()


class Distributions:
    """All series of a histogram, by label values."""

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Distribution] = {}

    def labels(self, *values: str) -> Distribution:
        """Return the series with these label values; created empty if new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Distribution(self._histogram.labels(*values), self._bounds)
        return series

    def forget(self, labels: Mapping[str, str]) -> None:
        """Remove the series with these label values."""
        for values in forget_series(self._histogram, labels):
            self._series.pop(values, None)

    def flush(self) -> None:
        """Add the updates since the last flush to `prometheus_client`."""
        for series in self._series.values():
            series.flush()


def forget_series(metric: Any, labels: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Remove the series of a metric with these label values, and return all their values; none if it lacks a label.

    With several workers the values stay in the files that the workers share: `prometheus_client` cannot remove them.
    Its own method for this exists from 0.23 on, and warns then.
    """
    names: tuple[str, ...] = metric._labelnames
    if not labels.keys() <= set(names):
        return []
    wanted = [(names.index(name), value) for name, value in labels.items()]
    with metric._lock:
        gone = [values for values in metric._metrics if all(values[index] == value for index, value in wanted)]
        for values in gone:
            del metric._metrics[values]
    return gone
