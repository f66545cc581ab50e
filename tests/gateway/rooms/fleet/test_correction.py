"""What requests in time say of the replicas that a traffic takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gateway.rooms.fleet.model import MOST, Correction, Judged

HOURS = 24 * 60


def played(truth: float, hopeless: float = 0.0, minutes: int = HOURS) -> tuple[Correction, list[float], list[float]]:
    """Follow the advice where requests are late beyond a load of `truth`; return factors and shares of misses."""
    rng, correction, saturation = np.random.default_rng(1), Correction(), math.nan
    factors, shares = [], []
    for _ in range(minutes):
        load = math.nan if math.isnan(saturation) else saturation / correction.factor * truth
        late = 0.0 if math.isnan(load) else 0.2 / (1.0 + math.exp(-20.0 * (load - 1.1)))
        missed = rng.binomial(600, hopeless + (1.0 - hopeless) * late)
        correction.update(Judged(600.0 - missed, missed), saturation)
        factors.append(correction.factor)
        shares.append(missed / 600.0)
        wanted = 40.3 * correction.factor
        saturation = wanted / math.ceil(wanted)
    return correction, factors, shares


@pytest.mark.parametrize("truth", [0.5, 0.8, 1.0, 1.5, 2.5])
def test_one_in_a_hundred_misses_whatever_the_formulas_say(truth: float) -> None:
    _, factors, shares = played(truth)
    assert np.mean(shares[-HOURS // 2 :]) == pytest.approx(0.01, abs=0.005)
    assert np.mean(factors[-HOURS // 2 :]) == pytest.approx(truth, rel=0.25)


def test_what_no_number_of_replicas_serves_in_time_is_not_paid_for() -> None:
    _, factors, _ = played(1.0, hopeless=0.08)
    assert max(factors) == MOST
    assert np.mean(factors[-HOURS // 4 :]) < 1.5


def test_misses_beside_too_few_replicas_and_none_beside_too_many_say_nothing() -> None:
    correction = Correction()
    for kept, missed, saturation in [(50.0, 50.0, 1.2), (0.0, 0.0, 0.3), (100.0, 0.0, 0.3)]:
        for _ in range(60):
            correction.update(Judged(kept, missed), saturation)
    assert correction.factor == 1.0
    correction.update(Judged(50.0, 50.0), 0.3)
    assert correction.factor > 1.2


def test_a_method_that_is_gone_is_given_another_chance_in_time() -> None:
    correction = Correction()
    for _ in range(60):
        correction.update(Judged(50.0, 50.0), 0.9)
    assert correction.factor == MOST
    factors = []
    for _ in range(28):
        for _ in range(HOURS):
            correction.update(Judged(0.0, 0.0), math.nan)
        factors.append(correction.factor)
    assert factors[0] > 0.8 * MOST
    assert factors[-1] < 1.05
