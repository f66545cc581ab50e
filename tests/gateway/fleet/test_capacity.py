"""What replicas carry, and which of them a traffic needs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from pytest import approx  # noqa: PT013

from gateway.fleet.capacity import Carrier, Load, Targets
from gateway.fleet.demand import Rates
from policies.learned.models.prior import StepCost
from policies.learned.models.step_time import seconds, terms

CODE, CHAT = ("code", "", "0-0.05"), ("chat", "", "0-0.05")
HEAD = Carrier(StepCost(0.008, 2e-5, 1e-8, 2e-5), 0.0, {CODE: 3.0, CHAT: 2.0}, 0)
MEAN = Rates(1.0, 1000.0, 200.0)


def load(*rows: tuple[float, ...], headroom: float = 1.0) -> Load:
    return Load(("head", "tree")[: len(rows[0])], np.array(rows), headroom)


def test_a_replica_at_its_capacity_keeps_the_target_by_the_fitted_step_time() -> None:
    share, answer_s = HEAD.seconds(CODE, MEAN, Targets(None, 0.005))
    in_flight = answer_s / share
    step_s = 0.005 * 3.0
    found_s = seconds(HEAD.cost, terms(in_flight, in_flight * 1100.0, MEAN.prompt_tokens / share * step_s))
    assert found_s == approx(step_s)
    assert answer_s == approx(200.0 * 0.005)


@pytest.mark.parametrize(
    ("worse", "targets"),
    [
        (HEAD, Targets(None, 0.0035)),
        (HEAD, Targets(0.1, 0.005)),
        (replace(HEAD, spread=0.25), Targets(None, 0.005)),
        (replace(HEAD, kv_tokens=20_000), Targets(None, 0.005)),
    ],
)
def test_less_is_carried_with_stricter_targets_uneven_requests_or_little_memory(
    worse: Carrier, targets: Targets
) -> None:
    assert worse.seconds(CODE, MEAN, targets)[0] > 1.05 * HEAD.seconds(CODE, MEAN, Targets(None, 0.005))[0]


def test_more_is_carried_of_prompts_that_are_cached() -> None:
    targets = Targets(None, 0.005)
    assert HEAD.seconds(CODE, MEAN, targets, cached=0.9)[0] < 0.9 * HEAD.seconds(CODE, MEAN, targets)[0]


def test_a_step_emits_a_token_however_uneven_the_requests_are() -> None:
    assert replace(HEAD, spread=5.0).seconds(CODE, MEAN, Targets(None, 0.02))[0] < 1.0


def test_a_target_that_cannot_be_kept_takes_any_number() -> None:
    assert HEAD.seconds(CODE, MEAN, Targets(None, 0.002))[0] == 1e6


def test_saturation_is_that_of_the_best_spread() -> None:
    assert load((2.0, 4.0)).saturation({"head": 1}) == approx(2.0)
    assert load((2.0, 4.0)).saturation({"head": 1, "tree": 1}) == approx(1.0 / (1 / 2.0 + 1 / 4.0), rel=0.01)
    assert load((1.0, 9.0), (9.0, 1.0)).saturation({"head": 1, "tree": 1}) == approx(1.0, rel=0.01)
    assert load((1.0, 9.0)).saturation({}) == math.inf


def test_saturation_is_exact_within_two_percent() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        costs = rng.lognormal(0.0, 0.7, (6, 2))
        to_tree = np.linspace(0.0, 1.0, 51)
        order = np.argsort(costs[:, 1] / costs[:, 0])  # those that lose least at `tree` go there first
        best = math.inf
        for at, share in itertools.product(range(6), to_tree):
            there = np.where(np.argsort(order) < at, 1.0, 0.0)
            there[order[at]] = share
            best = min(best, max(((1 - there) * costs[:, 0]).sum() / 2, (there * costs[:, 1]).sum()))
        assert load(*costs).saturation({"head": 2, "tree": 1}) == approx(best, rel=0.02)


def test_the_method_that_is_right_for_the_traffic_is_added_and_the_other_is_taken_away() -> None:
    night, noon = load((2.0, 0.5), (1.0, 0.4)), load((2.0, 5.0), (2.0, 6.0))
    assert night.needed({"head": 1, "tree": 0}) == {"head": 0, "tree": 1}
    assert noon.needed({"head": 1, "tree": 1}) == {"head": 4, "tree": 0}
    mixed = load((1.8, 20.0), (20.0, 1.8))
    assert mixed.needed({"head": 1}) == {"head": 2, "tree": 2}


def test_headroom_asks_for_more_and_one_replica_stays() -> None:
    assert load((1.9, 9.0), headroom=1.2).needed({"head": 2}) == {"head": 3, "tree": 0}
    assert load((1e-9, 1e-9)).needed({"head": 3, "tree": 2}) in ({"head": 1, "tree": 0}, {"head": 0, "tree": 1})
