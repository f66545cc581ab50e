"""What replicas carry, and which of them a traffic needs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from pytest import approx  # noqa: PT013

from gateway.rooms.fleet.capacity import Carrier, Load, Targets, World
from gateway.rooms.fleet.demand import Rates
from policies.learned.belief import RequestGroup
from policies.learned.prior import StepCost
from policies.learned.replica import terms

CODE, CHAT = ("code", "", "0-0.05"), ("chat", "", "0-0.05")
HEAD = Carrier(StepCost(0.008, 2e-5, 1e-8, 2e-5), 0.0, {CODE: 3.0, CHAT: 2.0}, 0)
MEAN = Rates(1.0, 1000.0, 200.0)


def load(*rows: tuple[float, ...], headroom: float = 1.0) -> Load:
    """Return a load in which a request for each group comes each second, and takes longer where it takes more."""
    costs = np.array(rows)
    takes = np.stack([np.full(costs.shape, 100.0), 1e-3 * costs, np.zeros(costs.shape)])
    return Load(("head", "tree"), costs, headroom, np.ones(len(rows)), np.full(2, 0.01), takes)


def test_a_replica_at_its_capacity_keeps_the_target_by_the_fitted_step_time() -> None:
    share, answer_s = HEAD.seconds(CODE, MEAN, Targets(None, 0.005))
    in_flight = answer_s / share
    step_s = 0.005 * 3.0
    found = terms(HEAD.cost, (in_flight, in_flight * 1100.0, MEAN.prompt_tokens / share * step_s))
    assert sum(found) == approx(step_s)
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


def test_what_is_carried_is_bounded_by_what_steps_can_do() -> None:
    targets = Targets(None, 0.005)
    cached = HEAD.seconds(CODE, MEAN, targets, cached=0.9)
    assert cached[0] < 0.9 * HEAD.seconds(CODE, MEAN, targets)[0]
    assert HEAD.seconds(CODE, MEAN, Targets(None, 0.002))[0] == 1e6, "a target that no number keeps"
    uneven = replace(HEAD, spread=5.0).seconds(CODE, MEAN, Targets(None, 0.02))
    assert uneven[0] < 1.0, "a step emits a token however uneven the requests are"


def test_no_number_keeps_targets_that_are_out_of_reach() -> None:
    world = World([RequestGroup(*CODE, 100.0, [])], {"head": HEAD}, Targets(None, 0.002), 0.0, [1.0])
    assert world.load_of(MEAN).needed({"head": 2}) == {}
    assert replace(world, targets=Targets(None, 0.005)).load_of(MEAN).needed({"head": 2}) == {"head": 1}


def test_a_method_whose_requests_are_late_is_not_counted_on() -> None:
    tree, targets = replace(HEAD, per_step={CODE: 1.1 * HEAD.per_step[CODE]}), Targets(None, 0.005)
    carriers, rates = {"head": HEAD, "tree": tree}, MEAN._replace(requests=100.0)
    world = World([RequestGroup(*CODE, 100.0, [])], carriers, targets, 0.0, [1.0, 1.0])
    assert world.load_of(rates).needed({"head": 2, "tree": 2})["head"] == 0
    assert replace(world, factors=[1.0, 2.0]).load_of(rates).needed({"head": 2, "tree": 2})["tree"] == 0


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
    assert load((1.0, 9.0)).saturation({}) == math.inf


def test_of_replicas_that_are_not_needed_those_stay_on_which_requests_take_least() -> None:
    costs = np.array([[0.01, 0.02]])  # less of a baseline is taken
    takes = np.array([[[200.0, 80.0]], [[2e-5, 4e-5]], [[0.01, 0.01]]])
    light = Load(("baseline", "tree"), costs, 1.0, np.array([1.0]), np.array([0.007, 0.0072]), takes)
    assert light.needed({"baseline": 2, "tree": 2}) == {"baseline": 0, "tree": 1}


def test_requests_take_their_steps_and_more_beside_others() -> None:
    alone, steps, request_s = 0.007 * 200.0, 200.0, 2e-5
    for rate in (1e-6, 100.0, 400.0):
        takes = np.array([[[steps]], [[request_s]], [[0.0]]])
        one = Load(("plain",), np.array([[0.1]]), 1.0, np.array([rate]), np.array([0.007]), takes)
        found = one.finish_s({"plain": 2})
        in_flight = rate / 2 * found
        assert found == approx(steps * (0.007 + in_flight * request_s), rel=1e-6)
        assert found >= alone
    assert one.finish_s({"plain": 1}) == math.inf


def test_the_spread_of_least_time_is_found() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        rates, base_s = rng.uniform(1.0, 20.0, 2), rng.uniform(0.007, 0.01, 2)
        takes = np.array([rng.uniform(50.0, 200.0, (2, 2)), np.full((2, 2), 5e-5), np.full((2, 2), 0.01)])
        found = Load(("head", "tree"), np.ones((2, 2)), 1.0, rates, base_s, takes).finish_s({"head": 1, "tree": 1})
        best = math.inf
        for shares in itertools.product(np.linspace(0.0, 1.0, 41), repeat=2):
            sent = rates[:, None] * np.array([[share, 1.0 - share] for share in shares])
            load_of_each = (sent * (takes[0] * takes[1] + takes[2])).sum(0)
            if load_of_each.max() < 1.0:
                times = takes[0] * base_s / (1.0 - load_of_each) + takes[2]
                best = min(best, float((sent * times).sum() / rates.sum()))
        assert found == approx(best, rel=0.02)


def test_headroom_asks_for_more_and_one_replica_stays() -> None:
    assert load((1.9, 9.0), headroom=1.2).needed({"head": 2}) == {"head": 3, "tree": 0}
    assert load((1e-9, 1e-9)).needed({"head": 3, "tree": 2}) in ({"head": 1, "tree": 0}, {"head": 0, "tree": 1})
