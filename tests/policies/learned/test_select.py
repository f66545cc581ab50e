"""Exploration yields a probability distribution of bounded cost for any costs and observations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.learned.select import explore
from policies.learned.settings import Exploration

DEFAULT = Exploration()
COSTS = st.floats(0.0, 1e4, allow_nan=False)
OBSERVATIONS = st.one_of(st.floats(0.0, 1e6), st.just(math.inf))
CANDIDATES = st.lists(st.tuples(COSTS, OBSERVATIONS), min_size=1, max_size=8)
SETTINGS = st.builds(Exploration, share=st.floats(0, 0.5), most=st.floats(0, 1))


@settings(max_examples=300, deadline=None)
@given(SETTINGS, CANDIDATES)
def test_probabilities_sum_to_one_and_the_cost_is_bounded(
    setting: Exploration, candidates: list[tuple[float, float]]
) -> None:
    costs, observations = [cost for cost, _ in candidates], [count for _, count in candidates]
    propensities = explore(setting.share, setting.most, costs, observations)
    assert len(propensities) == len(costs)
    assert all(0.0 <= propensity <= 1.0 for propensity in propensities)
    assert sum(propensities) == pytest.approx(1.0)
    best = min(costs)
    expected = sum(propensity * cost for propensity, cost in zip(propensities, costs, strict=True))
    assert expected <= best * (1 + setting.share) + 1e-9 * (1 + best)
    assert 1.0 - propensities[costs.index(best)] <= setting.most + 1e-12


@pytest.mark.parametrize("setting", [Exploration(share=0), Exploration(most=0)])
def test_exploration_can_be_disabled(setting: Exploration) -> None:
    assert explore(setting.share, setting.most, [2.0, 1.0, 3.0], [0, 0, 0]) == [0.0, 1.0, 0.0]


def test_there_is_no_exploration_without_alternatives_or_uncertainty() -> None:
    assert explore(DEFAULT.share, DEFAULT.most, [2.0], [0.0]) == [1.0]
    assert explore(DEFAULT.share, DEFAULT.most, [2.0, 1.0], [math.inf, 0.0]) == [0.0, 1.0]
    assert explore(DEFAULT.share, DEFAULT.most, [2.0, 1.0], [math.inf, math.inf]) == [0.0, 1.0]


def test_zero_costs_do_not_cause_division_by_zero() -> None:
    assert explore(DEFAULT.share, DEFAULT.most, [0.0, 1.0], [0, 0]) == [1.0, 0.0]
    assert sum(explore(0.5, 1.0, [0.0, 0.0, 5e-324], [math.inf, 0.0, 0.0])) == pytest.approx(1.0)
    free = explore(DEFAULT.share, 0.05, [0.0, 0.0], [0, 0])
    assert sorted(free) == pytest.approx([0.05, 0.95])


def test_uncertain_candidates_are_explored_more_and_exploration_fades() -> None:
    setting = Exploration(share=0.05)
    propensities = explore(setting.share, setting.most, [1.0, 1.1, 1.1], [0, 500, 0])
    assert propensities[2] > 3 * propensities[1] > 0
    fresh, known = (1 - explore(setting.share, setting.most, [1.0, 1.001], [count, count])[0] for count in (0, 5000))
    assert known < fresh / 10


def test_the_cost_bound_is_used_in_full_when_it_binds() -> None:
    setting = Exploration(share=0.003, most=0.05)
    costs = [1.0, 2.0, 5.0]
    propensities = explore(setting.share, setting.most, costs, [0, 0, 0])
    assert sum(map(lambda propensity, cost: propensity * cost, propensities, costs)) == pytest.approx(1.003)
