"""Values on a metrics page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def total(page: str, series: str, **labels: str) -> float:
    """Return the sum of the samples of a series that have some labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == series and labels.items() <= sample.labels.items()
    )
