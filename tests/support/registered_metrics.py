"""The series that the gateway registers."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Series:
    """A metric of the gateway, with its PromQL name (without suffixes for a histogram)."""

    name: str
    type: str
    labels: tuple[str, ...]


def registered() -> set[Series]:
    """Return all registered series."""
    series = set()
    for metric in Metrics().registry._collector_to_names:
        if isinstance(metric, MetricWrapperBase):
            (described,) = metric.describe()
            name = described.name + ("_total" if described.type == "counter" else "")
            series.add(Series(name, described.type, tuple(metric._labelnames)))
    assert series
    return series


def sample_names() -> set[str]:
    """Return every series name that a query may use."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {series.name + suffix for series in registered() for suffix in suffixes.get(series.type, ("",))}
