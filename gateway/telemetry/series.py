"""Counters and histograms that are cheap to update.

A `prometheus_client` counter takes a lock on each update, and a lookup of its labels costs twice as much again; for a
dozen counters, that exceeds all other bookkeeping of a request. The request path runs in one thread, the event loop's:
its updates are summed here without locks, and `flush` adds the sums to `prometheus_client`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from prometheus_client import Counter


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

    def __init__(self, series: Any) -> None:  # Any: its buckets are private; its public method only adds single values
        self._series = series
        self._bounds: list[float] = series._upper_bounds  # ascending, to infinity
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        bounds, index = self._bounds, 0
        while bounds[index] < value:  # when compiled, faster than `bisect_left`
            index += 1
        self._counts[index] += 1
        self._sum += value

    def totals(self) -> tuple[float, float]:
        """Return the sum of all values of this process, and their number."""
        counted = sum(bucket.get() for bucket in self._series._buckets)
        return self._series._sum.get() + self._sum, counted + sum(self._counts)

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


S = TypeVar("S", bound=Count | Distribution)


class Family(Generic[S]):
    """All series of a counter or a histogram, by label values.

    Examples
    --------
    >>> counts = Family(Counter("requests", "Requests", ("model",), registry=None), Count)
    >>> counts.labels("llama") is counts.labels("llama")
    True
    """

    def __init__(self, metric: Any, series: Callable[[Any], S]) -> None:
        self._metric = metric
        self._of = series  # wraps a series of the metric
        self._series: dict[tuple[str, ...], S] = {}

    def labels(self, *values: str) -> S:
        """Return the series with these label values; created at zero if new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._of(self._metric.labels(*values))
        return series

    def forget(self, labels: Mapping[str, str]) -> None:
        """Remove the series with these label values."""
        for values in forget_series(self._metric, labels):
            self._series.pop(values, None)

    def flush(self) -> None:
        """Add the updates since the last flush to `prometheus_client`."""
        for series in self._series.values():
            series.flush()


def forget_series(metric: Any, labels: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Remove the series of a metric with these label values, and return all their values; none if it lacks a label.

    With several workers, the values stay in their shared files: `prometheus_client` cannot remove them. Its own method
    exists from 0.23 on, and warns about that.
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
