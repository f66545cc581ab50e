"""The series that the gateway declares, and their values."""

from __future__ import annotations

from gateway.telemetry.registry import Registry
from scripts.reference.metrics import declared

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def sample_names() -> set[str]:
    """Return every series name that a query may use."""
    described = [each for metric in declared() for each in metric.describe()]
    return {each.name + suffix for each in described for suffix in SUFFIXES.get(each.type, ("",))}


def value_of(registry: Registry, name: str, **labels: str) -> float:
    """Return the sum of the values of a series whose labels match."""
    registry.flush()
    return sum(
        sample.value for sample in registry.samples() if sample.name == name and labels.items() <= sample.labels.items()
    )
