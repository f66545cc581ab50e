"""The k in force by batch size, and what is expected of it."""

from __future__ import annotations

import math

import pytest

from backends.draft_schedule import DraftSchedule, draft_schedule
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.acceptance import AcceptanceModel, at_max_k, by_level
from policies.learned.models.depth import Counted, Depth, between
from policies.learned.models.keys import key_of
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_by_k

CONFIG = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 48, 3], [49, 96, 1], [97, 999, 0]]}
SCHEDULE = draft_schedule(Method.EAGLE3, CONFIG)
KEY = key_of(RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", prompt_tokens=200))


def _k(depth: Depth, batch: float) -> float:
    return between(depth.levels, depth.place(batch))


def test_far_from_a_bound_the_k_is_that_of_the_schedule() -> None:
    depth = Depth(SCHEDULE)
    assert [_k(depth, batch) for batch in (1, 30, 72, 200, 5000)] == [3, 3, 1, 0, 0]


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


def test_a_schedule_that_grows_with_the_batch_is_followed_too() -> None:
    depth = Depth(DraftSchedule(3, (3, *[1] * 4, *[3] * 40)))
    assert (_k(depth, 1), _k(depth, 60)) == (1, 3)


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.SUFFIX])
def test_expected_depths_agree_with_arms_of_that_k(method: Method) -> None:
    depths = expected_by_k(DEFAULT_CALIBRATION, method, 5, "code", 0.0)
    of_arms = [expected_by_k(DEFAULT_CALIBRATION, method, k, "code", 0.0)[-1] for k in range(6)]
    assert depths == pytest.approx(of_arms, abs=0.02)


def test_what_is_learned_at_one_depth_holds_at_another() -> None:
    """Requests with a tenth more tokens per step than expected at k = 3, which ran at k = 1."""
    levels = [0, 1, 3]
    depths = expected_by_k(DEFAULT_CALIBRATION, Method.EAGLE3, 3, "chat", 0.0)
    seen = math.exp(depths[1] + 0.1)
    at_most, weight = at_max_k(depths, levels, (1, 0.0), seen)
    assert math.log(at_most) == pytest.approx(depths[3] + 0.1)
    assert weight == 1.0
    log = math.log(at_most)
    sums = (1000.0, 1000 * log, 1000 * log**2)
    fitted = AcceptanceModel.fit({("eagle3:3", "e", *KEY): sums}, DEFAULT_CALIBRATION)
    plain, shallow, deep = by_level(depths, fitted.tokens_per_step("eagle3:3", "e", KEY), levels)
    assert plain == 1.0
    assert shallow == pytest.approx(seen, rel=0.01)
    assert deep == pytest.approx(at_most, rel=0.01)


def test_an_answer_without_drafts_says_nothing_of_acceptance() -> None:
    assert at_max_k([0.0, 0.4, 0.6, 0.7], [0, 3], (0, 0.0), 1.0)[1] == 0.0


def test_what_an_engine_counts_by_position_tells_its_tokens_per_step_at_each_k() -> None:
    """An engine that accepts other shares than the calibration's, at k = 3 with few requests and at 1 with many."""
    shares = 0.9, 0.3, 0.2
    depth = Depth(SCHEDULE)
    counted, expected = Counted(depth), expected_by_k(DEFAULT_CALIBRATION, Method.EAGLE3, 3, "chat", 0.0)
    assert counted.depths(expected) == pytest.approx(expected)
    drafts, tokens, accepted = 0, 0, [0, 0, 0]

    def run(steps: int, k: int) -> None:
        nonlocal drafts, tokens
        drafts, tokens = drafts + steps, tokens + k * steps
        for position in range(k):
            accepted[position] += round(steps * shares[position])
        counted.read(drafts, tokens, tuple(accepted))

    run(100, 1)  # what was before the first reading tells nothing: its mean k may hide any mix
    for _ in range(50):
        run(1000, 1)
    first, *further = (math.exp(log) for log in counted.depths(expected)[1:])
    assert first == pytest.approx(1.9, abs=0.01)
    before, at_1, at_2, _ = (math.exp(log) for log in expected)
    assert further[0] == pytest.approx(
        1.9 + 0.9 * (at_2 - at_1) / (at_1 - before), abs=0.01
    )  # nothing was drafted there yet
    for _ in range(50):
        run(1000, 3)
        run(1000, 1)
    run(10, 3)  # too few: they count with the next
    assert [math.exp(log) for log in counted.depths(expected)] == pytest.approx([1.0, 1.9, 2.2, 2.4], abs=0.01)
    drafts, tokens, accepted = 0, 0, [0, 0, 0]  # it was started again
    run(5000, 3)
    assert [math.exp(log) for log in counted.depths(expected)] == pytest.approx([1.0, 1.9, 2.2, 2.4], abs=0.01)
