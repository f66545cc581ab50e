"""What the gateway has counted of each backend since it started, read from its metrics."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from backends.engine_metrics import EngineMetrics
from gateway.telemetry.metrics import BackendMetrics
from gateway.telemetry.series import Distribution

_FAILED = ("engine_error", "unanswered", "interrupted")
_COUNTED = ("gateway_requests_total", "gateway_output_tokens_total")
_MEASURED = ("gateway_itl_seconds", "gateway_ttft_seconds", "gateway_tpot_seconds")

Series = tuple[str, str, str, str]
"""Name, model, backend, and the outcome, the bucket's bound or `sum`."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values so far."""

    counts: list[float]  # number of values in each bucket; the last one is for those beyond all bounds
    total: float  # sum of the values


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one backend."""

    at_s: float  # time of the reading, by `time.monotonic`
    # ended, failed: requests that ended, and those of them that failed at the backend.
    ended: float
    failed: float
    output_tokens: float
    step: Histogram  # times between two chunks of streams
    ttft: Histogram
    tpot: Histogram
    engine: EngineMetrics | None  # the metrics that its engine last reported; None if it reported none


def totals_of(bound: BackendMetrics, engine: EngineMetrics | None, shared: Mapping[Series, float] | None) -> Totals:
    """Return what was counted of a backend."""
    model, backend, _ = bound.labels
    if shared is None:
        outcomes = {outcome: count.total() for outcome, count in bound.outcomes.items()}
        output_tokens = bound.output_tokens.total()
        step, ttft, tpot = (Histogram(*each.total()) for each in (bound.itl, bound.ttft, bound.tpot))
    else:
        outcomes = {name: shared.get((_COUNTED[0], model, backend, name), 0.0) for name in bound.outcomes}
        output_tokens = shared.get((_COUNTED[1], model, backend, ""), 0.0)
        pairs = zip(_MEASURED, (bound.itl, bound.ttft, bound.tpot), strict=True)
        step, ttft, tpot = (_histogram(shared, (name, model, backend), each) for name, each in pairs)
    failed = sum(outcomes[outcome] for outcome in _FAILED)
    return Totals(time.monotonic(), sum(outcomes.values()), failed, output_tokens, step, ttft, tpot, engine)


def _histogram(shared: Mapping[Series, float], series: tuple[str, str, str], distribution: Distribution) -> Histogram:
    bounds = [str(bound) for bound in distribution.bounds]
    return Histogram(
        [shared.get((*series, bound), 0.0) for bound in (*bounds, "+Inf")], shared.get((*series, "sum"), 0.0)
    )


class Shared:
    """The counts of all workers of a gateway, from the files in which their metrics meet.

    `prometheus_client` reads the same files for its page, but all of them, which takes five times as long.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Series | None] = {}

    def read(self) -> Mapping[Series, float]:
        """Return the sums of the series that the dashboard shows; takes milliseconds, so call it in a thread."""
        sums: defaultdict[Series, float] = defaultdict(float)
        for kind in ("counter", "histogram"):
            for path in self._folder.glob(f"{kind}_*.db"):
                for key, value, *_ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
                    series = self._known[key] if key in self._known else self._learn(key)
                    if series is not None:
                        sums[series] += value
        return sums

    def _learn(self, key: str) -> Series | None:
        _, name, labels, _ = json.loads(key)
        base, _, part = name.rpartition("_")
        series: Series | None = None
        if name in _COUNTED:
            series = name, labels["model"], labels["backend"], labels.get("outcome", "")
        elif base in _MEASURED and part in {"bucket", "sum"}:
            series = base, labels["model"], labels["backend"], labels.get("le", "sum")
        self._known[key] = series
        return series


def shared_by_workers() -> Shared | None:
    """Return the counts of all workers; None with one worker, which has them all."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return None if folder is None else Shared(Path(folder))
