"""The guardrail freezes a worse policy, rarely a better one, and thaws it when it is better again."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from policies.guarded.guardrail import Guardrail
from policies.policy import GuardrailSettings

SHARE = 0.1


def _feed(guardrail: Guardrail, rng: np.random.Generator, requests: int, log_ratio: float) -> int | None:
    """Feed requests until the guardrail freezes, and return the number of the last one, or None if it never freezes.

    Requests of the learned policy take `exp(log_ratio)` times as long. The standard deviation of the logarithm is 0.5,
    like that of seconds per token in a mixed pool.
    """
    values = rng.normal(0.0, 0.5, requests)
    control = rng.random(requests) < guardrail.control_share()
    for number in range(requests):
        by_control = bool(control[number])
        was_frozen = guardrail.frozen
        guardrail.observe(math.exp(values[number] + (0.0 if by_control else log_ratio)), control=by_control)
        if guardrail.frozen and not was_frozen:
            return number
    return None


@pytest.mark.slow
def test_equal_policies_are_rarely_frozen_under_continuous_monitoring() -> None:
    """150 runs of 3,000 requests, tested after every request: at a level of 0.01, P(> 6 freezes) is below 0.001."""
    freezes = 0
    for seed in range(150):
        guardrail = Guardrail(GuardrailSettings(share=SHARE, tolerance=0.0))
        freezes += _feed(guardrail, np.random.default_rng(seed), 3000, 0.0) is not None
    assert freezes <= 6


@pytest.mark.parametrize("seed", range(5))
def test_a_worse_policy_is_frozen(seed: int) -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    assert _feed(guardrail, np.random.default_rng(seed), 4000, math.log(1.6)) is not None
    assert guardrail.frozen
    assert guardrail.freezes == 1
    assert guardrail.control_share() == pytest.approx(1 - SHARE)


@pytest.mark.parametrize("seed", range(5))
def test_a_better_policy_is_not_frozen(seed: int) -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    assert _feed(guardrail, np.random.default_rng(seed), 4000, math.log(0.7)) is None
    assert guardrail.ratio == pytest.approx(0.7, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_frozen_policy_thaws_only_when_it_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    _feed(guardrail, rng, 4000, math.log(2.0))
    assert guardrail.frozen
    _feed(guardrail, rng, 2000, math.log(2.0))
    assert guardrail.frozen
    guardrail.thaw()  # by an operator; discards the observations
    _feed(guardrail, rng, 4000, math.log(2.0))
    assert guardrail.frozen
    assert guardrail.freezes == 2
    _feed(guardrail, rng, 6000, math.log(0.5))
    assert not guardrail.frozen


def test_a_slowdown_within_the_tolerance_is_accepted() -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE, tolerance=0.2))
    assert _feed(guardrail, np.random.default_rng(1), 6000, math.log(1.1)) is None


def test_few_requests_are_not_conclusive() -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    assert math.isnan(guardrail.ratio)
    for _ in range(39):
        guardrail.observe(100.0, control=False)
        guardrail.observe(0.1, control=True)
    assert not guardrail.frozen
    assert guardrail.ratio > 100


def test_without_a_share_nothing_is_compared() -> None:
    guardrail = Guardrail(GuardrailSettings(share=0))
    rng = Random(1)
    assert not any(guardrail.draw(rng) for _ in range(100))
    for _ in range(200):
        guardrail.observe(100.0, control=False)
    assert not guardrail.frozen
    assert math.isnan(guardrail.ratio)


def test_durations_of_zero_are_ignored() -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    guardrail.observe(0.0, control=False)
    guardrail.observe(-1.0, control=True)
    assert math.isnan(guardrail.ratio)


def test_draws_match_the_control_share() -> None:
    guardrail, rng = Guardrail(GuardrailSettings(share=0.2)), Random(4)
    assert sum(guardrail.draw(rng) for _ in range(10_000)) == pytest.approx(2000, abs=160)
    guardrail.frozen = True
    assert sum(guardrail.draw(rng) for _ in range(10_000)) == pytest.approx(8000, abs=160)
