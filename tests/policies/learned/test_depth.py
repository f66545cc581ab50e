"""The k in force by batch size, and what is expected of it."""

from __future__ import annotations

import math

import pytest

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, draft_schedule
from backends.speculation import Method
from policies.learned.depth import Depth, between
from policies.learned.known import Known
from policies.learned.prior import DEFAULT_CALIBRATION, expected_by_k
from policies.learned.replica import STEPS, KnownReplica
from policies.learned.table import LENGTH, PER_STEP
from policies.statistics import Statistics

CONFIG = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 48, 3], [49, 96, 1], [97, 999, 0]]}
SCHEDULE = draft_schedule(Method.EAGLE3, CONFIG)


def _k(depth: Depth, batch: float) -> float:
    return between(depth.levels, depth.place(batch))


def test_far_from_a_bound_the_k_is_that_of_the_schedule() -> None:
    depth = Depth(SCHEDULE)
    assert [_k(depth, batch) for batch in (1, 30, 72, 200, 5000)] == [3, 3, 1, 0, 0]
    growing = Depth(DraftSchedule(3, (3, *[1] * 4, *[3] * 40)))
    assert (_k(growing, 1), _k(growing, 60)) == (1, 3)


def test_near_a_bound_it_is_the_mean_over_the_batches_met() -> None:
    depth = Depth(SCHEDULE)
    ks = [_k(depth, batch) for batch in range(1, 130)]
    assert ks == sorted(ks, reverse=True)
    assert 1.5 < _k(depth, 48.5) < 2.5
    assert len({round(k, 6) for k in ks}) > 20


def test_a_mean_k_is_placed_between_the_levels_that_it_is_a_mix_of() -> None:
    depth = Depth(SCHEDULE)
    assert [between(depth.levels, depth.place_of_k(k)) for k in (0.0, 0.5, 2.0, 3.0)] == [0.0, 0.5, 2.0, 3.0]
    assert between([1.0, 2.0, 4.0], depth.place_of_k(2.0)) == 3.0
    assert (depth.place_of_k(-1.0), depth.place_of_k(9.0)) == ((0, 0.0), (1, 1.0))


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.SUFFIX])
def test_expected_depths_agree_with_arms_of_that_k(method: Method) -> None:
    depths = expected_by_k(DEFAULT_CALIBRATION, method, 5, "code", 0.0)
    of_arms = [expected_by_k(DEFAULT_CALIBRATION, method, k, "code", 0.0)[-1] for k in range(6)]
    assert depths == pytest.approx(of_arms, abs=0.02)


def replica() -> KnownReplica:
    backend = Backend("e", "m", Method.EAGLE3, "http://a", 3, speculative_config=CONFIG)
    return Known(DEFAULT_CALIBRATION, Statistics((PER_STEP, LENGTH, STEPS), lambda: 0.0)).replica(backend)


def test_what_is_learned_at_one_depth_holds_at_another() -> None:
    """Requests with a tenth more tokens per step than expected at k = 3, which ran at k = 1."""
    one, depths = replica(), expected_by_k(DEFAULT_CALIBRATION, Method.EAGLE3, 3, "chat", 0.0)
    excess, weight = one.excess(depths, math.exp(depths[1] + 0.1), (1, 0.0))
    assert excess == pytest.approx(0.1)
    assert weight == 1.0
    at = [one.per_step_at(depths, excess, place) for place in ((0, 0.0), (1, 0.0), (1, 1.0))]
    assert at == pytest.approx([1.0, math.exp(depths[1] + 0.1), math.exp(depths[3] + 0.1)])


def test_an_answer_without_drafts_says_nothing_of_acceptance() -> None:
    one, depths = replica(), expected_by_k(DEFAULT_CALIBRATION, Method.EAGLE3, 3, "chat", 0.0)
    assert one.excess(depths, 1.0, (0, 0.0))[1] == 0.0
