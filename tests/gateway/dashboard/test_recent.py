"""What was measured of late: quantiles, rates and acceptance between two readings, and the past of all backends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.engine_metrics import EngineMetrics
from gateway.dashboard.document import SERIES
from gateway.dashboard.history import POINTS, Past
from gateway.dashboard.recent import POINT_S, Recent, acceptance, quantiles
from gateway.dashboard.totals import Histogram, Totals

BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
NOTHING = Histogram([0.0] * (len(BOUNDS) + 1), 0.0)


def histogram(values: np.ndarray) -> Histogram:
    return Histogram(list(np.bincount(np.searchsorted(BOUNDS, values), minlength=len(BOUNDS) + 1)), float(values.sum()))


def totals(at_s: float, ended: float, engine: EngineMetrics | None = None, **histograms: Histogram) -> Totals:
    measured = {name: histograms.get(name, NOTHING) for name in ("step", "ttft", "tpot")}
    return Totals(at_s=at_s, ended=ended, failed=0.0, output_tokens=10 * ended, engine=engine, **measured)


def test_quantiles_are_in_the_right_bucket() -> None:
    values = np.random.default_rng(1).lognormal(np.log(0.05), 0.6, 5000)
    found = quantiles(BOUNDS, histogram(values).counts)
    assert found is not None
    assert found.count == 5000
    for share, value in ((0.5, found.p50_s), (0.95, found.p95_s), (0.99, found.p99_s)):
        true = float(np.quantile(values, share))
        assert np.searchsorted(BOUNDS, value) == np.searchsorted(BOUNDS, true)


def test_quantiles_beyond_all_bounds_are_the_last_one_and_without_values_there_are_none() -> None:
    assert quantiles(BOUNDS, [0.0] * 7) is None
    found = quantiles(BOUNDS, [0.0] * 6 + [5.0])
    assert found is not None
    assert found.p50_s == found.p99_s == BOUNDS[-1]


def test_only_the_last_minutes_count() -> None:
    recent = Recent(BOUNDS, BOUNDS)
    slow, fast = histogram(np.full(100, 0.3)), np.full(100, 0.015)
    recent.add(totals(0.0, 0))
    recent.add(totals(POINT_S, 100, ttft=slow))
    assert recent.measured.ttft is not None
    assert recent.measured.ttft.p50_s > 0.16
    assert recent.measured.requests_per_s == pytest.approx(100 / POINT_S)
    for number in range(2, 90):
        after = histogram(np.concatenate([np.full(100, 0.3), fast]))
        recent.add(totals(number * POINT_S, 200, ttft=after if number > 60 else slow))
    assert recent.measured.ttft.p99_s <= 0.02
    assert recent.measured.ttft.count == 100
    assert recent.measured.requests_per_s == 0
    assert recent.measured.ttft_of_late is None, "the last minute had none"


def test_step_time_is_that_of_the_last_seconds() -> None:
    recent = Recent(BOUNDS, BOUNDS)
    recent.add(totals(0.0, 0, step=Histogram([0, 0, 50, 0, 0, 0, 0], 50 * 0.03)))
    recent.add(totals(POINT_S, 0, step=Histogram([100, 0, 50, 0, 0, 0, 0], 50 * 0.03 + 100 * 0.008)))
    assert recent.measured.step_s == pytest.approx(0.008)


def test_counts_that_begin_again_are_not_subtracted() -> None:
    recent = Recent(BOUNDS, BOUNDS)
    recent.add(totals(0.0, 1000))
    recent.add(totals(POINT_S, 3))
    assert recent.measured.requests_per_s == 0
    recent.add(totals(2 * POINT_S, 13))
    assert recent.measured.requests_per_s == pytest.approx(10 / POINT_S)


def test_acceptance_of_an_engine_that_started_again_is_since_its_start() -> None:
    before = EngineMetrics(drafts=1000, draft_tokens=3000, accepted_tokens=2000, accepted_per_position=(900, 700, 400))
    after = EngineMetrics(drafts=10, draft_tokens=30, accepted_tokens=5, accepted_per_position=(4, 1, 0))
    found = acceptance(before, after, 60.0)
    assert found is not None
    assert (found.by_position, found.window_s, found.drafts) == ([0.4, 0.1, 0.0], None, 10)
    assert acceptance(before, EngineMetrics(), 60.0) is None
    assert acceptance(None, None, 60.0) is None


def test_positions_that_an_engine_reports_later_count_from_zero() -> None:
    before = EngineMetrics(drafts=10, draft_tokens=10, accepted_tokens=5, accepted_per_position=(5,))
    after = EngineMetrics(drafts=20, draft_tokens=40, accepted_tokens=18, accepted_per_position=(13, 3, 2))
    found = acceptance(before, after, 60.0)
    assert found is not None
    assert found.by_position == [0.8, 0.3, 0.2]
    assert found.window_s == 60.0


def test_the_past_has_a_bound_and_follows_the_backends() -> None:
    past = Past()
    for number in range(POINTS + 40):
        points: dict[tuple[str, str], list[float | None]] = {("m", "a"): [float(number)] * len(SERIES)}
        if number > POINTS:
            points["m", "b"] = [None] * len(SERIES)
        past.add(float(number), points)
    document = past.document()
    assert len(document.at_s) == POINTS
    assert document.at_s[-1] == POINTS + 39
    a, b = (each.values.tolist() for each in document.backends)
    assert a[0] == [float(number) for number in range(40, POINTS + 40)]
    assert all(math.isnan(number) for number in b[-1])
    past.add(500.0, {("m", "b"): [1.0] * len(SERIES)})
    (left,) = past.document().backends
    assert left.backend == "b"
    assert math.isnan(left.values[0][-2])
    assert left.values[0][-1] == 1.0
