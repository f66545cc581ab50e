"""The registry of a gateway process, for the series that `series.yaml` describes. Label values are bounded.

With one worker, values live in the process. With several, `PROMETHEUS_MULTIPROC_DIR` is set before this module is
imported, the workers keep values in files there, and each can serve the page of all. `flush` writes updates of the
request path there (see `series`): the page is exact for the worker that serves it, and at most half a second old for
the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from backends.backend import Backend
from gateway.telemetry.allocated import allocate_shared_values
from gateway.telemetry.series import Count, Distribution, Family, forget_series

Series = Mapping[str, Any]
"""The description of a series, as in `series.yaml`; rooms of other packages pass their own."""


def _catalogue() -> tuple[dict[str, list[float]], dict[str, Series]]:
    """Return the buckets of histograms by name, and the series of the core and of the rooms that exist."""
    core = yaml.safe_load(files("gateway.telemetry").joinpath("series.yaml").read_text("utf-8"))
    for room in files("gateway.rooms").iterdir():
        if (file := room.joinpath("series.yaml")).is_file():
            core["series"] |= yaml.safe_load(file.read_text("utf-8"))
    return core["buckets"], core["series"]


_BUCKETS, _SERIES = _catalogue()


class Registry:
    """The series of a gateway process; declaring one again returns the existing one."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a third series for each counter and histogram
        self._collected = CollectorRegistry()
        self._is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if self._is_shared:
            allocate_shared_values()
            MultiProcessCollector(self._collected)  # type: ignore[no-untyped-call]
        self._families: dict[str, Family[Any]] = {}  # the counters and histograms
        self._gauges: dict[str, Gauge] = {}
        self.declared: list[Counter | Gauge | Histogram] = []
        self._present: frozenset[tuple[str, str]] | None = None

    def counter(self, name: str, series: Series | None = None) -> Family[Count]:
        """Declare a counter."""
        if name not in self._families:
            known = series or _SERIES[name]
            self._declare(name, Counter(name, known["help"], known["labels"], registry=self._own), Count)
        return self._families[name]

    def histogram(self, name: str, series: Series | None = None) -> Family[Distribution]:
        """Declare a histogram."""
        if name not in self._families:
            known = series or _SERIES[name]
            bounds = _BUCKETS[known["buckets"]]
            made = Histogram(name, known["help"], known["labels"], buckets=bounds, registry=self._own)
            self._declare(name, made, Distribution)
        return self._families[name]

    def _declare(self, name: str, made: Counter | Histogram, series: Callable[[Any], Count | Distribution]) -> None:
        self.declared.append(made)
        self._families[name] = Family(made, series)

    def gauge(self, name: str, series: Series | None = None) -> Gauge:
        """Declare a gauge."""
        if name not in self._gauges:
            known = series or _SERIES[name]
            mode = known.get("workers", "livemostrecent")
            made = Gauge(name, known["help"], known.get("labels", ()), registry=self._own, multiprocess_mode=mode)
            self.declared.append(made)
            self._gauges[name] = made
        return self._gauges[name]

    def flush(self) -> None:
        """Add pending updates to `prometheus_client`, for the page of any process; runs on the event loop."""
        for family in self._families.values():
            family.flush()

    def forget(self, **labels: str) -> None:
        """Remove the series with these label values, of a model, a backend or a key that is gone."""
        for family in self._families.values():
            family.forget(labels)
        for gauge in self._gauges.values():
            forget_series(gauge, labels)

    def set_present(self, backends: Iterable[Backend], models: Iterable[str]) -> None:
        """Set what is shown; needed with several workers, whose shared files keep the series of what was removed."""
        if self._is_shared:
            of_backends = {(backend.model, backend.name) for backend in backends}
            self._present = frozenset(of_backends | {(model, "") for model in models})

    def samples(self) -> Iterator[Sample]:
        """Yield the values of all series, of all workers, without those of models and backends that are gone."""
        for metric in _Page(self._collected, self._present).collect():
            yield from metric.samples

    def page(self) -> bytes:
        """Return the page that Prometheus scrapes, in its text format."""
        return generate_latest(_Page(self._collected, self._present))

    @property
    def _own(self) -> CollectorRegistry | None:
        """The registry for series; None with several workers, whose series are read from files."""
        return None if self._is_shared else self._collected


class _Page(CollectorRegistry):
    """A registry without the series of models and backends that are gone."""

    def __init__(self, registry: CollectorRegistry, present: frozenset[tuple[str, str]] | None) -> None:
        super().__init__()
        self._registry = registry
        self._present = present

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for metric in self._registry.collect():
            if (present := self._present) is not None:
                metric.samples = [sample for sample in metric.samples if _is_present(sample, present)]
            yield metric


def _is_present(sample: Sample, present: frozenset[tuple[str, str]]) -> bool:
    model = sample.labels.get("model")
    return not model or (model, sample.labels.get("backend", "")) in present
