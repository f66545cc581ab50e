"""The page that Prometheus scrapes: in its text format or as OpenMetrics, there with exemplars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from gateway.telemetry.series import Distributions

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"


def render(
    registry: CollectorRegistry,
    accept: str,
    present: frozenset[tuple[str, str]] | None,
    marked: Mapping[str, Distributions],
) -> tuple[bytes, str]:
    """Return the page and its content type."""
    wants_openmetrics = _OPENMETRICS in accept
    chosen, content_type = choose_encoder(accept if wants_openmetrics else "")
    encode = cast("Callable[[CollectorRegistry], bytes]", chosen)
    page = _Page(registry, present, marked if content_type.startswith(_OPENMETRICS) else {})
    return encode(page), content_type if wants_openmetrics else _TEXT


class _Page(CollectorRegistry):
    """A registry without the series of backends that are gone, and with the exemplars of this process.

    Those of other workers are not shown: `prometheus_client` does not share them. A scrape meets any of the workers.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        present: frozenset[tuple[str, str]] | None,
        marked: Mapping[str, Distributions],
    ) -> None:
        super().__init__()
        self._registry = registry
        self._present = present
        self._marked = marked

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for metric in self._registry.collect():
            if (present := self._present) is not None:
                metric.samples = [sample for sample in metric.samples if _is_present(sample, present)]
            if (distributions := self._marked.get(metric.name)) is not None:
                metric.samples = [_with_exemplar(sample, distributions) for sample in metric.samples]
            yield metric


def _is_present(sample: Sample, present: frozenset[tuple[str, str]]) -> bool:
    name = sample.labels.get("backend")
    return not name or (sample.labels["model"], name) in present


def _with_exemplar(sample: Sample, distributions: Distributions) -> Sample:
    if "le" not in sample.labels:
        return sample
    exemplar = distributions.exemplars_of(sample.labels).get(float(sample.labels["le"]))
    return sample if exemplar is None else sample._replace(exemplar=exemplar)
