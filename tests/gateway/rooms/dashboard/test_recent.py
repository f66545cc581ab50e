"""What was measured of late: quantiles and rates between two readings, and the past of all backends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gateway.rooms.dashboard.recent import POINT_S, POINTS, SERIES, Past, Recent, Totals, quantiles

BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, math.inf)


def counted(values: np.ndarray) -> dict[float, float]:
    """Return the number of values up to each bound."""
    return {bound: float((values <= bound).sum()) for bound in BOUNDS}


def test_quantiles_are_in_the_right_bucket() -> None:
    values = np.random.default_rng(1).lognormal(np.log(0.05), 0.6, 5000)
    found = quantiles({}, counted(values))
    assert found["count"] == 5000
    for share, value in ((0.5, found["p50_s"]), (0.95, found["p95_s"]), (0.99, found["p99_s"])):
        true = float(np.quantile(values, share))
        assert np.searchsorted(BOUNDS, value) == np.searchsorted(BOUNDS, true)


def test_quantiles_beyond_all_bounds_are_the_last_one_and_without_values_there_are_none() -> None:
    assert quantiles({}, {}) is quantiles({}, counted(np.array([]))) is None
    found = quantiles({}, counted(np.full(5, 9.0)))
    assert found["p50_s"] == found["p99_s"] == BOUNDS[-2]


def test_only_the_last_minutes_count() -> None:
    recent, slow = Recent(), np.full(100, 0.3)
    recent.add(Totals(0.0))
    recent.add(Totals(POINT_S, ended=100, ttft=counted(slow)))
    assert recent.measured.ttft["p50_s"] > 0.16
    assert recent.measured.requests_per_s == pytest.approx(100 / POINT_S)
    for number in range(2, 90):
        values = np.concatenate([slow, np.full(100, 0.015)]) if number > 60 else slow
        recent.add(Totals(number * POINT_S, ended=200, ttft=counted(values)))
    assert recent.measured.ttft["p99_s"] <= 0.02
    assert recent.measured.ttft["count"] == 100
    assert recent.measured.requests_per_s == 0
    assert recent.measured.ttft_of_late is None, "the last minute had none"


def test_step_time_is_that_of_the_last_seconds() -> None:
    recent = Recent()
    recent.add(Totals(0.0, steps=50, steps_s=50 * 0.03))
    recent.add(Totals(POINT_S, steps=150, steps_s=50 * 0.03 + 100 * 0.008))
    assert recent.measured.step_s == pytest.approx(0.008)


def test_counts_that_begin_again_are_not_subtracted() -> None:
    recent = Recent()
    recent.add(Totals(0.0, ended=1000))
    recent.add(Totals(POINT_S, ended=3))
    assert recent.measured.requests_per_s == 0
    recent.add(Totals(2 * POINT_S, ended=13))
    assert recent.measured.requests_per_s == pytest.approx(10 / POINT_S)


def test_the_past_has_a_bound_and_follows_the_backends() -> None:
    past = Past()
    for number in range(POINTS + 40):
        points: dict[tuple[str, str], list[float | None]] = {("m", "a"): [float(number)] * len(SERIES)}
        if number > POINTS:
            points["m", "b"] = [None] * len(SERIES)
        past.add(float(number), points)
    document = past.document()
    assert len(document["at_s"]) == POINTS
    assert document["at_s"][-1] == POINTS + 39
    a, b = (each["values"].tolist() for each in document["backends"])
    assert a[0] == [float(number) for number in range(40, POINTS + 40)]
    assert all(math.isnan(number) for number in b[-1])
    past.add(500.0, {("m", "b"): [1.0] * len(SERIES)})
    (left,) = past.document()["backends"]
    assert left["backend"] == "b"
    assert math.isnan(left["values"][0][-2])
    assert left["values"][0][-1] == 1.0
