"""Rules that earn their place: support, a gain beyond noise, and what becomes of the others' requests."""

from __future__ import annotations

import numpy as np

from policies.distill.fluid_choice import Situations
from policies.distill.support import MIN_REQUESTS, RuleList
from policies.distill.tree import Group

TARGETS = {"left": [0], "right": [1]}
KINDS = 200


def rule_names(
    left_s: np.ndarray, right_s: np.ndarray, requests: float, bounds: dict[str, tuple[tuple[int, int], ...]]
) -> list[str]:
    """Return the rules that are left of those with some bounds on one column, for costs by kind of request.

    Kind i has the value i in that column, and is met in two situations.
    """
    rng = np.random.default_rng(0)
    idle_s = np.column_stack([left_s, right_s])
    idle_s = np.vstack([idle_s, idle_s])
    rows = np.tile(np.arange(KINDS, dtype=float), 2)[:, None]
    keys = tuple((str(kind),) for kind in [*range(KINDS), *range(KINDS)])
    load = rng.integers(0, 3, idle_s.shape).astype(float)
    situations = Situations(keys, load, idle_s, 0.05 * idle_s, np.ones(2 * KINDS))
    groups, left = [], np.ones(2 * KINDS, bool)
    for name, bound in bounds.items():
        matches = left.copy()
        for column, highest in bound:
            matches &= rows[:, column] <= highest
        groups.append(Group(name, {}, bound, np.flatnonzero(matches)))
        left &= ~matches
    rules = RuleList(groups, rows, situations, requests, TARGETS)
    rules.drop_unearned(len(bounds))
    indices = np.concatenate([group.indices for group, _ in rules.fitted])
    assert sorted(indices) == list(range(2 * KINDS)), "each situation belongs to one rule"
    return [group.name for group, _ in rules.fitted]


LOW = np.arange(KINDS) < 40
SPLIT = {"low": ((0, 39),), "default": ()}
ALONE = np.ones(KINDS)


def test_a_rule_with_support_and_gain_stays() -> None:
    assert rule_names(np.where(LOW, 0.5, 2.0), ALONE, 1000.0, SPLIT) == ["low", "default"]


def test_a_rule_needs_requests() -> None:
    left_s = np.where(LOW, 0.5, 2.0)
    enough = MIN_REQUESTS / 0.2
    assert rule_names(left_s, ALONE, 1.05 * enough, SPLIT) == ["low", "default"]
    assert rule_names(left_s, ALONE, 0.95 * enough, SPLIT) == ["default"]


def test_rules_with_the_same_weights_are_one() -> None:
    third = {"low": ((0, 39),), "middle": ((0, 79),), "default": ()}
    assert rule_names(np.full(KINDS, 0.5), ALONE, 1e6, third) == ["default"]
    assert rule_names(np.where(np.arange(KINDS) < 80, 0.5, 2.0), ALONE, 1e6, third) == ["middle", "default"]


def test_a_gain_within_noise_is_none() -> None:
    noise = np.exp(np.random.default_rng(1).normal(0.0, 0.7, KINDS))
    left_s = np.where(LOW, 0.97, 1.0) * noise
    assert rule_names(left_s, ALONE, 300.0, SPLIT) == ["default"]
    assert rule_names(np.where(LOW, 0.3, 1.2) * noise, ALONE, 300.0, SPLIT) == ["low", "default"]


def test_a_gain_of_few_requests_must_be_larger_than_their_spread() -> None:
    """The rule saves 1% of all, far above the least saving; by how its requests differ, 32 of them could by chance."""
    left_s = np.where(LOW, np.where(np.arange(KINDS) % 2, 0.2, 1.7), 2.0)
    assert rule_names(left_s, ALONE, 160.0, SPLIT) == ["default"]
    assert rule_names(left_s, ALONE, 1e5, SPLIT) == ["low", "default"]


def test_how_much_a_rule_must_save_is_relative() -> None:
    """For one kind of 200, about 2 of 10,000 are too little and 2 of 1,000 enough, in seconds as in milliseconds."""
    first = {"low": ((0, 0),), "default": ()}
    for unit in (1.0, 1e3):
        for low_s, names in ((0.9, ["default"]), (0.5, ["low", "default"])):
            left_s = unit * np.where(np.arange(KINDS) == 0, low_s, 2.0)
            assert rule_names(left_s, unit * ALONE, 1e9, first) == names
