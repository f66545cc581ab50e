"""The guardrail freezes what is worse, seldom what is not, and lets go when it is better again."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from policies.learned.guardrail import Guardrail
from policies.learned.settings import GuardrailSettings

SHARE = 0.1


def _feed(guardrail: Guardrail, rng: np.random.Generator, requests: int, log_ratio: float) -> int | None:
    """Feed requests of which those of the learned policy take `exp(log_ratio)` times as long; tell when it froze.

    The spread is that of seconds per token in a mixed pool: half of the logarithm.
    """
    values = rng.normal(0.0, 0.5, requests)
    control = rng.random(requests) < guardrail.control_share()
    for number in range(requests):
        by_control = bool(control[number])
        was = guardrail.frozen
        guardrail.observe(math.exp(values[number] + (0.0 if by_control else log_ratio)), control=by_control)
        if guardrail.frozen and not was:
            return number
    return None


def test_equals_are_seldom_frozen_however_often_one_looks() -> None:
    """150 runs of 3,000 requests, looked at after each: level 0.01, so more than 6 freezes are a chance of 0.001."""
    freezes = 0
    for seed in range(150):
        guardrail = Guardrail(GuardrailSettings(share=SHARE, tolerance=0.0))
        freezes += _feed(guardrail, np.random.default_rng(seed), 3000, 0.0) is not None
    assert freezes <= 6


@pytest.mark.parametrize("seed", range(5))
def test_what_is_made_worse_is_frozen(seed: int) -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    assert _feed(guardrail, np.random.default_rng(seed), 4000, math.log(1.6)) is not None
    assert guardrail.frozen
    assert guardrail.freezes == 1
    assert guardrail.control_share() == pytest.approx(1 - SHARE)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_better_is_not(seed: int) -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    assert _feed(guardrail, np.random.default_rng(seed), 4000, math.log(0.7)) is None
    assert guardrail.ratio == pytest.approx(0.7, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_it_thaws_when_learned_is_better_and_stays_frozen_while_it_is_worse(seed: int) -> None:
    rng = np.random.default_rng(seed)
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    _feed(guardrail, rng, 4000, math.log(2.0))
    assert guardrail.frozen
    _feed(guardrail, rng, 2000, math.log(2.0))
    assert guardrail.frozen
    guardrail.thaw()  # forgets what it saw, as an operator may
    _feed(guardrail, rng, 4000, math.log(2.0))
    assert guardrail.frozen
    assert guardrail.freezes == 2
    _feed(guardrail, rng, 6000, math.log(0.5))
    assert not guardrail.frozen


def test_a_little_worse_than_tolerated_is_tolerated() -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE, tolerance=0.2))
    assert _feed(guardrail, np.random.default_rng(1), 6000, math.log(1.1)) is None


def test_few_requests_prove_nothing() -> None:
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


def test_what_took_no_time_is_no_observation() -> None:
    guardrail = Guardrail(GuardrailSettings(share=SHARE))
    guardrail.observe(0.0, control=False)
    guardrail.observe(-1.0, control=True)
    assert math.isnan(guardrail.ratio)


def test_it_draws_its_share() -> None:
    guardrail, rng = Guardrail(GuardrailSettings(share=0.2)), Random(4)
    assert sum(guardrail.draw(rng) for _ in range(10_000)) == pytest.approx(2000, abs=160)
    guardrail.frozen = True
    assert sum(guardrail.draw(rng) for _ in range(10_000)) == pytest.approx(8000, abs=160)
