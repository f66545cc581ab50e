"""The series that the gateway declares, and their values."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.telemetry.registry import Registry
from scripts.reference.metrics import declared


@dataclass(frozen=True, slots=True)
class Series:
    """A metric of the gateway, with its PromQL name (without suffixes for a histogram)."""

    name: str
    type: str
    labels: tuple[str, ...]


def registered() -> set[Series]:
    """Return all declared series."""
    series = set()
    for metric in declared():
        (described,) = metric.describe()
        name = described.name + ("_total" if described.type == "counter" else "")
        series.add(Series(name, described.type, tuple(metric._labelnames)))
    assert series
    return series


def sample_names() -> set[str]:
    """Return every series name that a query may use."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {series.name + suffix for series in registered() for suffix in suffixes.get(series.type, ("",))}


def value_of(registry: Registry, name: str, **labels: str) -> float:
    """Return the sum of the values of a series whose labels match."""
    registry.flush()
    return sum(
        sample.value for sample in registry.samples() if sample.name == name and labels.items() <= sample.labels.items()
    )
