"""The series that the gateway registers, as the code knows them."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Series:
    """A metric of the gateway, by the name it has in PromQL (a histogram's without its suffixes)."""

    name: str
    type: str
    labels: tuple[str, ...]


def registered() -> set[Series]:
    """Return all of them."""
    found = set()
    for metric in Metrics().registry._collector_to_names:
        if isinstance(metric, MetricWrapperBase):
            (described,) = metric.describe()
            name = described.name + ("_total" if described.type == "counter" else "")
            found.add(Series(name, described.type, tuple(metric._labelnames)))
    assert found
    return found


def sample_names() -> set[str]:
    """Return every name that a query may use."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {one.name + suffix for one in registered() for suffix in suffixes.get(one.type, ("",))}
