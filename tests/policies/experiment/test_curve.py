"""What blocks show of two arms: their ratio by load, and where it crosses 1, held against known truths."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest

from policies.experiment.curve import Fit, Row, fit


def _rows(seed: int, blocks: int, slope: float, difference: float) -> list[Row]:
    """Return blocks of two arms whose logarithms differ by `difference + slope * log(load / 10)`."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(blocks):
        pace = 0.3 * math.sin(number / 20)  # the traffic changes slowly
        for arm in (0, 1):
            x = float(rng.normal(0.0, 0.3))
            own = (0.5 if arm == 0 else -0.5) * (difference + slope * x)
            y = pace + own + 0.4 * x + float(rng.normal(0.0, 0.04))
            rows.append(Row(number, arm, math.exp(y), 10.0 * math.exp(x)))
    return rows


def _fit(rows: list[Row]) -> Fit:
    found = fit(rows)
    assert found is not None
    return found


def test_nothing_is_said_of_a_few_blocks() -> None:
    assert fit(_rows(1, 3, 0.0, 0.1)) is None
    assert fit([]) is None


def test_the_ratio_is_found_at_each_load() -> None:
    found = _fit(_rows(1, 400, 0.3, -0.1))
    for point in found.curve(0.95):
        assert point.ratio == pytest.approx(math.exp(-0.1 + 0.3 * math.log(point.work_per_s / 10)), rel=0.02)


def test_arms_that_serve_in_turns_are_compared_with_their_neighbours() -> None:
    rows = [row for row in _rows(2, 600, 0.0, 0.05) if row.arm == row.number % 2]
    point = _fit(rows).overall(0.95)
    assert point.low < math.exp(0.05) < point.high
    assert point.high / point.low < 1.1


@pytest.mark.parametrize("side", [1, -1])
def test_the_crossing_is_found_with_what_is_better_below(side: int) -> None:
    crossing = _fit(_rows(3, 400, side * 0.5, 0.0)).crossing(0.95)
    assert crossing is not None
    assert crossing.better_below == (0 if side > 0 else 1)
    truth = 10.0 * math.exp(0.3 * np.mean(np.sin(np.arange(400) / 20)))  # work times seconds per work
    assert crossing.low < truth < crossing.high
    assert crossing.in_flight == pytest.approx(truth, rel=0.15)


def test_over_all_loads_the_ratio_is_that_of_the_mean_times_without_what_is_explored() -> None:
    rng, rows, seconds = np.random.default_rng(5), [], [0.0, 0.0]
    for number in range(400):
        x, more = float(rng.normal(0.0, 0.5)), (0.0, 0.22, -0.22)[number % 3]
        for arm, sign in ((0, 1.0), (1, -1.0)):
            slope = 0.4 + 0.3 * sign
            seconds[arm] += math.exp(x + slope * x)
            own = x + sign * more
            rows.append(Row(number, arm, math.exp(slope * own + float(rng.normal(0.0, 0.02))), math.exp(own)))
    found = _fit(rows).overall(0.95)
    assert found.ratio == pytest.approx(seconds[0] / seconds[1], rel=0.01)
    assert found.ratio > 1.1, "busy times count more"


def test_arms_that_do_not_cross_have_no_crossing() -> None:
    assert _fit(_rows(4, 400, 0.1, 0.3)).crossing(0.95) is None


@pytest.mark.slow
def test_the_interval_holds_the_truth_at_all_looks() -> None:
    """200 runs, looked at after every fourth block. At 95%, P(fewer than 178 hold) is below 0.001."""
    held = 0
    for seed in range(200):
        rows = _rows(seed, 80, 0.0, 0.05)
        looks = [_fit(rows[: 2 * blocks]).overall(0.95) for blocks in range(8, 81, 4)]
        held += all(look.low <= math.exp(0.05) <= look.high for look in looks)
    assert held >= 178


def test_an_arm_of_few_requests_looks_no_better_by_that() -> None:
    """As with one replica against seven: 10 requests of one arm in a block, and 70 of the other."""
    found = []
    for seed in range(12):
        rng, rows = np.random.default_rng(seed), []
        for number in range(200):
            for arm, requests in enumerate((10, 70)):
                seconds = rng.lognormal(-0.32, 0.8, requests)
                rows.append(Row(number, arm, seconds.mean(), rng.uniform(0.9, 1.1)))
        found.append(_fit(rows).log_ratio)
    assert abs(fmean(found)) < 0.015, "means of logarithms differ by 0.037"
