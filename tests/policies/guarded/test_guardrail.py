"""The guardrail switches the whole pool by blocks of time, freezes a worse policy, and thaws it when it is better."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from policies.guarded.guardrail import Guardrail
from policies.policy import GuardrailSettings

BLOCK_S = 40.0
HALF = GuardrailSettings(share=0.5, block_s=BLOCK_S)
START_S = 1_700_000_000.0


class Pool:
    """Requests that take the time that whoever decides when they arrive causes, and some luck."""

    def __init__(self, guardrail: Guardrail, seed: int = 0, per_s: int = 4) -> None:
        self.guardrail = guardrail
        self.now_s = START_S
        self.rng = np.random.default_rng(seed)
        self.per_s = per_s

    def run(self, blocks: int, ratio: float, until: Callable[[], bool] = lambda: False) -> float | None:
        """Play some blocks in which the policy takes `ratio` times as long; return the seconds until `until` holds."""
        began_s = self.now_s
        for _ in range(int(blocks * BLOCK_S)):
            slow = 1.0 if self.guardrail.by_control(self.now_s) else ratio
            for _ in range(self.per_s):
                work = float(self.rng.exponential(100.0)) + 1.0
                seconds = slow * 0.005 * work * float(np.exp(self.rng.normal(0.0, 0.25)))
                self.guardrail.observe(self.now_s + seconds, seconds, work, "chat")
            if until():
                return self.now_s - began_s
            self.now_s += 1.0
        return None


def test_all_processes_switch_together_and_the_share_of_time_is_kept() -> None:
    one, two = (Guardrail(GuardrailSettings(share=0.1, block_s=BLOCK_S)) for _ in range(2))
    turns = [one.by_control(START_S + BLOCK_S * number) for number in range(1000)]
    assert turns == [two.by_control(START_S + BLOCK_S * number + 17.0) for number in range(1000)]
    assert sum(turns) == pytest.approx(100, abs=1)
    places = {number % 10 for number, turn in enumerate(turns) if turn}
    assert len(places) == 10, "no hour and no minute belongs to one of the two"
    assert one.share() == pytest.approx(0.1)


def test_a_block_of_each_cycle_is_the_policy_s_also_where_another_process_has_frozen_it() -> None:
    frozen, running = (Guardrail(GuardrailSettings(share=0.1, block_s=BLOCK_S)) for _ in range(2))
    frozen.frozen = True
    both = [
        (frozen.by_control(START_S + BLOCK_S * number), running.by_control(START_S + BLOCK_S * number))
        for number in range(1000)
    ]
    assert sum(one for one, _ in both) == pytest.approx(900, abs=1)
    assert both.count((False, False)) == pytest.approx(100, abs=1), "the policy's own, in both"
    assert both.count((True, True)) == pytest.approx(100, abs=1), "that of `least_loaded`, in both"


@pytest.mark.parametrize("seed", range(4))
def test_a_worse_policy_is_frozen_and_thaws_only_when_it_is_better(seed: int) -> None:
    guardrail = Guardrail(HALF)
    pool = Pool(guardrail, seed)
    assert pool.run(40, 1.3, lambda: guardrail.frozen) is not None
    assert guardrail.freezes == 1
    assert guardrail.share() == 0.5
    pool.run(20, 1.3)
    assert guardrail.frozen
    guardrail.thaw()  # by an operator; discards the observations
    assert math.isnan(guardrail.ratio)
    assert pool.run(40, 1.3, lambda: guardrail.frozen) is not None
    assert guardrail.freezes == 2
    assert pool.run(60, 0.8, lambda: not guardrail.frozen) is not None


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.01])
def test_a_policy_that_is_not_worse_is_not_frozen(ratio: float) -> None:
    for seed in range(4):
        guardrail = Guardrail(HALF)
        Pool(guardrail, seed).run(40, ratio)
        assert not guardrail.frozen
        assert guardrail.ratio == pytest.approx(ratio, rel=0.1)


def test_a_slowdown_within_the_tolerance_is_accepted() -> None:
    guardrail = Guardrail(GuardrailSettings(share=0.5, block_s=BLOCK_S, tolerance=0.2))
    pool = Pool(guardrail)
    pool.run(60, 1.1)
    assert not guardrail.frozen
    assert guardrail.comparison(0.99).low > 1.02, "but it is seen"


def test_a_suspected_harm_gets_every_second_block_until_it_is_certain() -> None:
    """With a block in 25 for `least_loaded`, five of them would take 83 minutes."""
    guardrail = Guardrail(GuardrailSettings(share=0.04, block_s=BLOCK_S))
    pool = Pool(guardrail, 3, per_s=2)
    doubted_s = pool.run(100, 1.12, lambda: guardrail.share() == 0.5)
    assert doubted_s is not None
    assert not guardrail.frozen
    frozen_s = pool.run(25, 1.12, lambda: guardrail.frozen)
    assert frozen_s is not None
    assert guardrail.share() == pytest.approx(0.96)


def test_nothing_is_shown_before_there_is_evidence() -> None:
    guardrail = Guardrail(GuardrailSettings(share=0.1, block_s=BLOCK_S))
    pool = Pool(guardrail)
    assert pool.run(60, 0.9, lambda: not math.isnan(guardrail.ratio)) is not None
    blocks = guardrail.comparison(0.95)
    assert blocks.control >= 1
    assert blocks.own >= 8
    assert (blocks.low, blocks.high) == pytest.approx((blocks.ratio / 1.1, blocks.ratio * 1.1), rel=0.1)


def test_few_requests_are_no_evidence() -> None:
    guardrail = Guardrail(HALF)
    for second in range(0, 4000, 12):  # three in a block
        guardrail.by_control(START_S + second)
        guardrail.observe(START_S + second + 1.0, 1.0, 100.0, "")
    assert guardrail.comparison(0.95).control == 0


def test_requests_that_are_too_long_for_the_blocks_are_told_and_compare_nothing() -> None:
    guardrail = Guardrail(HALF)
    for second in range(4000):
        guardrail.by_control(START_S + second)
        guardrail.observe(START_S + second, 10.0, 100.0, "")
    assert guardrail.needed_block_s() == pytest.approx(80.0)
    assert math.isnan(guardrail.ratio)
    Pool(guardrail).run(40, 1.0)
    assert guardrail.needed_block_s() is None


def test_a_change_of_the_mix_is_no_gain() -> None:
    """Code takes half the seconds per token, and comes more in the blocks of the policy: unadjusted, 7% less."""
    guardrail = Guardrail(HALF)
    rng = np.random.default_rng(2)
    for second in range(4000):
        now_s = START_S + second
        control = guardrail.by_control(now_s)
        for _ in range(10):
            code = rng.random() < (0.45 if control else 0.55)
            seconds = (0.5 if code else 1.0) * float(np.exp(rng.normal(0, 0.2)))
            guardrail.observe(now_s + seconds, seconds, 100.0, "code" if code else "chat")
    assert guardrail.ratio == pytest.approx(1.0, abs=0.02)


def test_without_a_share_nothing_is_compared() -> None:
    guardrail = Guardrail(GuardrailSettings(share=0))
    assert not any(guardrail.by_control(float(now_s)) for now_s in range(0, 10_000, 7))
    for now_s in range(200):
        guardrail.observe(float(now_s), 100.0, 100.0, "")
    assert guardrail.share() == 0
    assert not guardrail.frozen
    assert math.isnan(guardrail.ratio)


def test_a_block_in_which_no_request_arrives_is_not_compared() -> None:
    """Long requests from the end of the block before are in it, enough of them to count, and one that failed."""
    guardrail = Guardrail(HALF)
    begun_s = START_S - START_S % BLOCK_S
    for tenths in range(350):
        guardrail.by_control(begun_s + 0.1 * tenths)
        guardrail.observe(begun_s + 0.1 * tenths, 0.1, 100.0, "")
    guardrail.by_control(begun_s + BLOCK_S + 1.0)
    for _ in range(10):
        guardrail.observe(begun_s + 88.0, 50.0, 50_000.0, "")
    for tenths in range(400):
        guardrail.observe(begun_s + 100.0 + 0.1 * tenths, 0.1, 100.0, "")
    assert guardrail.needed_block_s() is None
    compared = guardrail.comparison(0.95)
    assert compared.own + compared.control <= 1


def test_a_frozen_policy_that_seems_better_gets_every_second_block_until_it_is_certain() -> None:
    guardrail = Guardrail(GuardrailSettings(share=0.04, block_s=BLOCK_S))
    guardrail.frozen = True
    pool = Pool(guardrail, 3, per_s=2)
    assert pool.run(100, 0.9, lambda: guardrail.share() == 0.5) is not None
    assert guardrail.frozen
    assert pool.run(50, 0.9, lambda: not guardrail.frozen) is not None
