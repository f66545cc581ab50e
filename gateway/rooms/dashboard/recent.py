"""Recent figures of a backend, as differences between readings of counters; and its history."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.samples import Sample

from gateway.relay.accounting import FAILED

POINT_S = 5.0
"""Seconds between two readings."""

STEP_WINDOW_S = 10.0
RATE_WINDOW_S = 60.0
WINDOW_S = 300.0
"""Window of the quantiles shown; those over time use `RATE_WINDOW_S`."""
POINTS = 360
"""Points kept; with `POINT_S` half an hour."""
SERIES = (
    "in_flight",
    "requests_per_s",
    "step_s",
    "tokens_per_step",
    "ttft_p95_s",
    "tpot_p95_s",
)
"""The numbers of a backend over time, in the order of its points."""

Document = dict[str, Any]
"""Part of the data for the page."""


@dataclass(slots=True)
class Totals:
    """The counters of a backend since the gateway started."""

    at_s: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    failed: float = 0.0  # of those ended: failed at the backend
    output_tokens: float = 0.0
    # steps, steps_s: times between two chunks of streams, and their sum.
    steps: float = 0.0
    steps_s: float = 0.0
    # ttft, tpot: the number of values up to each upper bound, in seconds.
    ttft: dict[float, float] = field(default_factory=dict)
    tpot: dict[float, float] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add the value of a series."""
        name, value = sample.name, sample.value
        if name == "gateway_requests_total":
            self.ended += value
            self.failed += value if sample.labels["outcome"] in FAILED else 0.0
        elif name == "gateway_output_tokens_total":
            self.output_tokens += value
        elif name == "gateway_itl_seconds_count":
            self.steps += value
        elif name == "gateway_itl_seconds_sum":
            self.steps_s += value
        elif name in {"gateway_ttft_seconds_bucket", "gateway_tpot_seconds_bucket"}:
            counts, bound_s = (self.ttft if "ttft" in name else self.tpot), float(sample.labels["le"])
            counts[bound_s] = counts.get(bound_s, 0.0) + value


def totals_of(samples: Iterable[Sample]) -> dict[tuple[str, str], Totals]:
    """Return the counters of each backend, by model and name; takes milliseconds."""
    found: dict[tuple[str, str], Totals] = {}
    for sample in samples:
        if name := sample.labels.get("backend"):
            found.setdefault((sample.labels["model"], name), Totals()).add(sample)
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """Recent measurements of a backend; None for unknown ones."""

    step_s: float | None = None  # mean time between two chunks of streams, over the last seconds
    requests_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    failed: int = 0  # requests over the last minutes
    # Quantiles over the last minutes, and over the last one.
    ttft: Document | None = None
    tpot: Document | None = None
    ttft_of_late: Document | None = None
    tpot_of_late: Document | None = None


class Recent:
    """The readings of a backend in the last minutes."""

    def __init__(self) -> None:
        self._readings: deque[Totals] = deque(maxlen=int(WINDOW_S / POINT_S) + 1)
        self.measured = Measured()

    def add(self, now: Totals) -> None:
        """Add a reading, and set `measured`."""
        readings = self._readings
        if readings and now.ended < readings[-1].ended:  # the backend left and came back
            readings.clear()
        readings.append(now)
        first, minute, lately = (
            next(self._within(now, window_s)) for window_s in (WINDOW_S, RATE_WINDOW_S, STEP_WINDOW_S)
        )
        elapsed_s, steps = now.at_s - minute.at_s, now.steps - lately.steps

        def per_s(count: float) -> float:
            return count / elapsed_s if elapsed_s else 0.0

        self.measured = Measured(
            (now.steps_s - lately.steps_s) / steps if steps else None,
            per_s(now.ended - minute.ended),
            per_s(now.output_tokens - minute.output_tokens),
            round(now.failed - first.failed),
            quantiles(first.ttft, now.ttft),
            quantiles(first.tpot, now.tpot),
            quantiles(minute.ttft, now.ttft),
            quantiles(minute.tpot, now.tpot),
        )

    def _within(self, now: Totals, window_s: float) -> Iterator[Totals]:
        """Yield the readings of a window, oldest first."""
        return (one for one in self._readings if now.at_s - one.at_s <= window_s + POINT_S / 2)


def quantiles(before: Mapping[float, float], now: Mapping[float, float]) -> Document | None:
    """Return quantiles of the values between two readings, interpolated as Prometheus' `histogram_quantile` does.

    Examples
    --------
    >>> quantiles({}, {0.1: 0, 0.2: 100, 0.4: 100, float("inf"): 100})
    {'p50_s': 0.15000000000000002, 'p95_s': 0.195, 'p99_s': 0.199, 'count': 100}
    """
    bounds = sorted(now)
    cumulated = [now[bound] - before.get(bound, 0.0) for bound in bounds]
    count = round(cumulated[-1]) if cumulated else 0
    if count <= 0:
        return None
    known = bounds[:-1]  # without infinity

    def at(share: float) -> float:
        rank = share * count
        index = next(index for index, upto in enumerate(cumulated) if upto >= rank)
        if index == len(known):
            return known[-1]
        lower, below = (known[index - 1], cumulated[index - 1]) if index else (0.0, 0.0)
        return lower + (known[index] - lower) * (rank - below) / (cumulated[index] - below)

    return {"p50_s": at(0.5), "p95_s": at(0.95), "p99_s": at(0.99), "count": count}


class KeptObjectives:
    """The requests with a latency objective that were served in time in the last minutes, by model and class."""

    def __init__(self) -> None:
        self._readings: deque[Counter[tuple[str, str, str]]] = deque([Counter()], maxlen=int(WINDOW_S / POINT_S) + 1)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add a reading of the series."""
        reading: Counter[tuple[str, str, str]] = Counter()
        for each in samples:
            if each.name == "gateway_slo_requests_total":
                reading[each.labels["model"], each.labels["slo_class"], each.labels["outcome"]] += round(each.value)
        self._readings.append(reading)

    def of(self, model: str) -> list[Document]:
        """Return each class of a model that had requests, with their number and how many were in time."""
        found: dict[str, Document] = {}
        for (name, slo_class, outcome), count in (self._readings[-1] - self._readings[0]).items():
            if name == model:
                row = found.setdefault(slo_class, {"name": slo_class, "requests": 0, "kept": 0})
                row["requests"] += count
                row["kept"] += count if outcome == "kept" else 0
        return sorted(found.values(), key=lambda row: str(row["name"]))


def loads_of(samples: Iterable[Sample]) -> dict[str, float]:
    """Return each known model's traffic, as a share of what its replicas carry within the targets."""
    return {each.labels["model"]: each.value for each in samples if each.name == "gateway_pool_saturation"}


class Past:
    """The points of all backends, in bounded memory: 10 kB each.

    Examples
    --------
    >>> past = Past()
    >>> past.add(1.0, {("llama", "a"): [2.0] * len(SERIES)})
    >>> past.document()["backends"][0]["values"][0]
    array([2.], dtype=float32)
    """

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._rings: dict[tuple[str, str], npt.NDArray[np.float32]] = {}  # one column per point, newest last

    def add(self, at_s: float, points: Mapping[tuple[str, str], list[float | None]]) -> None:
        """Add a point for each current backend; forget the others."""
        self._at_s = [*self._at_s, at_s][-POINTS:]
        self._rings = {key: self._rings.get(key, _EMPTY) for key in points}
        for key, point in points.items():
            shifted = np.roll(self._rings[key], -1, axis=1)
            shifted[:, -1] = np.array(point, np.float32)  # None becomes NaN
            self._rings[key] = shifted

    def document(self) -> Document:
        """Return all points; unknown values are NaN, in JSON null."""
        count = len(self._at_s)
        backends = [
            {"model": model, "backend": backend, "values": np.ascontiguousarray(ring[:, POINTS - count :])}
            for (model, backend), ring in self._rings.items()
        ]
        return {"series": SERIES, "at_s": self._at_s, "backends": backends}


_EMPTY = np.full((len(SERIES), POINTS), np.nan, np.float32)
