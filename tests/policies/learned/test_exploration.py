"""Exploring is a probability distribution whose price is bounded, whatever the costs and however little is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.learned.exploration import explore
from policies.learned.settings import Exploration

USUAL = Exploration()
COSTS = st.floats(0.0, 1e4, allow_nan=False)
SEEN = st.one_of(st.floats(0.0, 1e6), st.just(math.inf))
CANDIDATES = st.lists(st.tuples(COSTS, SEEN), min_size=1, max_size=8)
SETTINGS = st.builds(Exploration, share=st.floats(0, 0.5), most=st.floats(0, 1))


@settings(max_examples=300, deadline=None)
@given(SETTINGS, CANDIDATES)
def test_probabilities_sum_to_one_and_cost_no_more_than_the_share(
    setting: Exploration, candidates: list[tuple[float, float]]
) -> None:
    costs, seen = [cost for cost, _ in candidates], [count for _, count in candidates]
    propensities = explore(setting.share, setting.most, costs, seen)
    assert len(propensities) == len(costs)
    assert all(0.0 <= chance <= 1.0 for chance in propensities)
    assert sum(propensities) == pytest.approx(1.0)
    best = min(costs)
    expected = sum(chance * cost for chance, cost in zip(propensities, costs, strict=True))
    assert expected <= best * (1 + setting.share) + 1e-9 * (1 + best)
    place = costs.index(best)
    assert 1.0 - propensities[place] <= setting.most + 1e-12


@pytest.mark.parametrize("setting", [Exploration(share=0), Exploration(most=0)])
def test_none_where_none_is_wanted(setting: Exploration) -> None:
    assert explore(setting.share, setting.most, [2.0, 1.0, 3.0], [0, 0, 0]) == [0.0, 1.0, 0.0]


def test_none_where_there_is_no_choice_or_nothing_to_learn() -> None:
    assert explore(USUAL.share, USUAL.most, [2.0], [0.0]) == [1.0]
    assert explore(USUAL.share, USUAL.most, [2.0, 1.0], [math.inf, 0.0]) == [0.0, 1.0]
    assert explore(USUAL.share, USUAL.most, [2.0, 1.0], [math.inf, math.inf]) == [0.0, 1.0]


def test_costs_of_zero_divide_nothing() -> None:
    assert explore(USUAL.share, USUAL.most, [0.0, 1.0], [0, 0]) == [1.0, 0.0]
    free = explore(USUAL.share, 0.05, [0.0, 0.0], [0, 0])
    assert sorted(free) == pytest.approx([0.05, 0.95])


def test_the_unknown_is_tried_more_than_the_known_and_all_less_as_it_becomes_known() -> None:
    setting = Exploration(share=0.05)
    propensities = explore(setting.share, setting.most, [1.0, 1.1, 1.1], [0, 500, 0])
    assert propensities[2] > 3 * propensities[1] > 0
    fresh, known = (1 - explore(setting.share, setting.most, [1.0, 1.001], [count, count])[0] for count in (0, 5000))
    assert known < fresh / 10


def test_the_price_is_spent_where_it_binds() -> None:
    setting = Exploration(share=0.003, most=0.05)
    costs = [1.0, 2.0, 5.0]
    propensities = explore(setting.share, setting.most, costs, [0, 0, 0])
    assert sum(map(lambda chance, cost: chance * cost, propensities, costs)) == pytest.approx(1.003)
