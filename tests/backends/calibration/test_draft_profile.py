"""Rates at positions beyond the measured ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from backends.calibration.draft_profile import rates_to
from backends.speculation import Method

CHAINED, UNROLLED, BLOCK = Method.MTP, Method.EAGLE3, Method.DSPARK


@pytest.mark.parametrize("method", [CHAINED, Method.EAGLE, UNROLLED, BLOCK])
@pytest.mark.parametrize("rates", [(0.44,), (0.8, 0.6), (0.79, 0.61, 0.46), (0.6, 0.7), (0.99, 0.99, 0.98)])
def test_further_rates_follow_the_known_ones_within_what_was_measured(method: Method, rates: tuple[float, ...]) -> None:
    full = rates_to(method, rates, 8)
    assert full[: len(rates)] == rates
    assert rates_to(method, rates, 1) == rates[:1]
    low, high = min(rates[-1], 0.7) - 0.45, max(*rates[-2:], 0.7) + 1e-9
    assert all(low < rate <= high for rate in full[len(rates) :])


def test_a_chained_layer_falls_ever_less_and_others_stay() -> None:
    falling, flat = rates_to(CHAINED, (0.79, 0.61, 0.46), 8), rates_to(UNROLLED, (0.79, 0.61, 0.46), 8)
    falls = [before - after for before, after in pairwise(falling[2:])]
    assert falls == sorted(falls, reverse=True)
    assert falls[-1] > 0
    assert falling[-1] > 0.2
    assert len(set(flat[3:])) == 1
    assert 0.46 < flat[-1] < 0.7
    assert rates_to(UNROLLED, (0.44,), 5) == (0.44,) * 5
    assert rates_to(BLOCK, (0.79, 0.61, 0.46), 8) == flat
