"""Blocks of time, and the interval of the gain from them, which covers the true ratio whenever one looks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.experiment.blocks import Blocks, Paces
from policies.experiment.interval import margin_at_any_time
from policies.experiment.turns import Comparison, Turns


def _run(seed: int, groups: int, ratio: float, confidence: float) -> tuple[bool, Comparison]:
    """Return whether every interval of a run held the true ratio, and the last; groups differ in load and in pace."""
    rng = np.random.default_rng(seed)
    turns = Turns()
    held = True
    for group in range(groups):
        pace = float(rng.normal(0.0, 0.2))
        for block in range(8):
            load = float(rng.normal(5.0, 0.1))
            log = pace + 0.5 * load + float(rng.normal(0.0, 0.02)) + (0.0 if block == 3 else math.log(ratio))
            turns.add(12 * group + block, math.exp(log), math.exp(load), control=block == 3)
            if block % 4 == 3:
                found = turns.comparison(confidence)
                held &= math.isnan(found.low) or found.low <= ratio <= found.high
    return held, turns.comparison(confidence)


@pytest.mark.slow
def test_it_holds_the_true_ratio_at_all_times_at_least_as_often_as_it_says() -> None:
    """200 runs, looked at after every fourth block. At 80%, P(fewer than 143 hold) is below 0.001."""
    runs = [_run(seed, 20, 0.8, 0.8) for seed in range(200)]
    held = sum(held for held, _ in runs)
    assert 143 <= held < 200, "and it is not so wide that it always holds"
    assert np.mean([found.ratio for _, found in runs]) == pytest.approx(0.8, rel=0.005)


def test_the_load_of_the_blocks_and_the_pace_of_the_groups_are_adjusted_for() -> None:
    """Unadjusted, a group's difference would have a deviation of 0.055, and the interval be ±5%."""
    _, found = _run(1, 20, 0.9, 0.95)
    assert found.high / found.low < 1.045


def test_nothing_is_said_of_one_arm_or_of_a_few_blocks() -> None:
    turns = Turns()
    for block in range(50):
        turns.add(block, 1.0 + 0.01 * (block % 3), 5.0, control=False)
    assert turns.comparison(0.95) == pytest.approx((math.nan, math.nan, math.nan, 0, 0), nan_ok=True)
    pair = Turns()
    pair.add(0, 1.0, 5.0, control=True)
    pair.add(1, 0.84, 5.0, control=False)
    assert math.isnan(pair.comparison(0.95).ratio)
    pair.add(12, 1.0, 5.0, control=True)
    pair.add(13, 0.83, 5.0, control=False)
    assert math.isnan(pair.comparison(0.95).ratio)


def test_old_groups_are_forgotten() -> None:
    turns = Turns()
    for group in range(300):
        for block in range(6):
            seconds = 1.0 if block == 2 else (2.0 if group < 200 else 0.5)
            turns.add(12 * group + block, seconds * (1.0 + 0.01 * (block % 2)), 5.0, control=block == 2)
    assert turns.comparison(0.95).ratio == pytest.approx(0.5, rel=0.02)
    assert turns.comparison(0.95).control < 60


def test_an_estimated_variance_widens_the_margin_up_to_all_differences() -> None:
    margins = [margin_at_any_time(0.004, 0.95, freedom) for freedom in (1, 4, 8, 32, 10_000, math.inf)]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] == math.inf
    assert margins[-2] == pytest.approx(margins[-1], rel=0.001)


def test_a_client_s_kinds_are_bounded() -> None:
    paces = Paces()
    for number in range(1000):
        paces.of(f"kind {number}", 1.0, 100.0)
    assert len(paces._kinds) <= 65


def test_a_request_counts_in_each_block_by_the_time_that_it_spent_there() -> None:
    blocks = Blocks(40.0)
    assert blocks.begin(10, 401.0)
    assert blocks.begin(11, 440.0)
    assert not blocks.begin(12, 495.0), "its beginning was not seen"
    blocks.observe(455.0, 35.0, 100.0, "", 0)  # from 420 to 455, of which 420 to 435 and 450 to 455 count
    found = dict(blocks.closed(600.0))
    assert [found[10][0].seconds, found[11][0].seconds] == [15.0, 5.0]
    assert found[10][0].arrived_work > 0.0 == found[11][0].arrived_work
    assert not dict(blocks.closed(600.0))
