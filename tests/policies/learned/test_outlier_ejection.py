"""What behaves unlike its method is taken out, tried again, and longer out the next time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.learned.outlier_ejection import FADES_S, FIRST_S, LONGEST_S, OutlierEjection

POOL = [Backend(name, "m", Method.EAGLE3, "http://x", num_speculative_tokens=3) for name in ("a", "b")]


def _names(outlier_ejection: OutlierEjection, now_s: float) -> list[str]:
    return [one.name for one in outlier_ejection.admit(POOL, now_s)]


def _feed(
    outlier_ejection: OutlierEjection, times: int, step: float | None, acceptance: float | None, now_s: float = 0.0
) -> float:
    slowness = 1.0
    for _ in range(times):
        slowness = outlier_ejection.observe("a", step, acceptance, now_s)
    return slowness


def test_an_ordinary_backend_stays() -> None:
    outlier_ejection = OutlierEjection()
    for step, acceptance in [(1.0, 1.0), (1.3, 0.8), (0.8, 1.2), (1.1, None), (None, 0.9), (None, None)] * 20:
        outlier_ejection.observe("a", step, acceptance, 0.0)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]
    assert outlier_ejection.reasons == {}


@pytest.mark.parametrize(("step", "acceptance", "word"), [(6.0, 1.0, "steps"), (1.0, 0.25, "tokens per step")])
def test_exploding_steps_and_collapsing_acceptance_take_it_out(step: float, acceptance: float, word: str) -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 5, step, acceptance)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]  # not yet sure
    _feed(outlier_ejection, 5, step, acceptance)
    assert _names(outlier_ejection, 0.0) == ["b"]
    assert word in outlier_ejection.reasons["a"]


def test_one_stall_does_not() -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 20, 1.0, 1.0)
    _feed(outlier_ejection, 1, 1000.0, 0.001)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]


def test_it_comes_back_after_its_time_and_what_went_before_is_forgotten() -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 10, 6.0, 1.0)
    _feed(outlier_ejection, 30, 6.0, 1.0)  # ends of what was under way when it was taken out
    assert _names(outlier_ejection, FIRST_S - 0.1) == ["b"]
    assert _names(outlier_ejection, FIRST_S) == ["a", "b"]
    _feed(outlier_ejection, 1, 1.0, 1.0, FIRST_S + 1)
    assert _names(outlier_ejection, FIRST_S + 1) == ["a", "b"]


def test_what_is_out_or_back_is_not_held_to_be_slow() -> None:
    """Else it would not be tried, and nothing would ever tell that it is well."""
    outlier_ejection = OutlierEjection()
    assert _feed(outlier_ejection, 5, 6.0, 1.0) > 3
    assert _feed(outlier_ejection, 15, 6.0, 1.0) == 1.0


def test_relapses_last_longer_and_health_is_rewarded() -> None:
    outlier_ejection, now_s, lasted = OutlierEjection(), 0.0, []
    for _ in range(8):
        _feed(outlier_ejection, 10, 6.0, 1.0, now_s)
        began_s = now_s
        while "a" not in _names(outlier_ejection, now_s):
            now_s += FIRST_S / 2
        lasted.append(now_s - began_s)
    assert lasted == [min(LONGEST_S, FIRST_S * 2**number) for number in range(8)]
    _feed(outlier_ejection, 30, 1.0, 1.0, now_s)
    _feed(outlier_ejection, 30, 6.0, 1.0, now_s)
    assert _names(outlier_ejection, now_s + FIRST_S - 0.1) == ["b"]
    assert _names(outlier_ejection, now_s + FIRST_S) == ["a", "b"]


def test_a_pool_of_which_all_are_out_still_serves() -> None:
    outlier_ejection = OutlierEjection()
    for name in ("a", "b"):
        for _ in range(10):
            outlier_ejection.observe(name, 6.0, 1.0, 0.0)
    assert set(outlier_ejection.reasons) == {"a", "b"}
    assert _names(outlier_ejection, 1.0) == ["a", "b"]


def test_slowness_is_told_before_it_takes_a_backend_out() -> None:
    outlier_ejection = OutlierEjection()
    assert _feed(outlier_ejection, 10, 1.1, 1.0) == 1.0
    assert _feed(outlier_ejection, 20, 2.0, 1.0) == pytest.approx(2.0, rel=0.05)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]


def test_slowness_that_nothing_confirms_fades() -> None:
    outlier_ejection = OutlierEjection()
    slow = _feed(outlier_ejection, 20, 2.0, 1.0)
    told = [outlier_ejection.slowness("a", after_s) for after_s in (0.0, FADES_S, 2 * FADES_S, 100 * FADES_S)]
    assert told == pytest.approx([slow, 1 + (slow - 1) / 2, 1 + (slow - 1) / 4, 1.0])
    assert _feed(outlier_ejection, 1, 2.0, 1.0, 50 * FADES_S) == pytest.approx(slow, rel=0.01)  # confirmed
    assert outlier_ejection.slowness("never seen", 0.0) == 1.0


def _answers(rng: np.random.Generator, share: float, count: int, spread: float) -> list[float]:
    """Draw tokens per step over those expected, 2.5: skewed, never under one token, a few brilliant."""
    logs = rng.gamma(2.0, spread / 2**0.5, count) - spread * 2**0.5  # mean 0, this spread, a long right tail
    expected = 2.5
    return [max(1.0, 1.0 + share * (expected * math.exp(log) - 1.0)) / expected for log in logs]


@pytest.mark.parametrize("spread", [0.15, 0.35, 0.55])
def test_however_much_acceptance_varies_the_healthy_stay_and_the_faulty_go(spread: float) -> None:
    rng = np.random.default_rng(5)
    outlier_ejection = OutlierEjection()
    for ratio in _answers(rng, 1.0, 20_000, spread):
        outlier_ejection.observe("a", float(rng.lognormal(0.0, 0.05)), ratio, 0.0, spread)
    assert outlier_ejection.reasons == {}
    delays = []
    for _ in range(20):
        outlier_ejection = OutlierEjection()
        for ratio in _answers(rng, 1.0, 50, spread):
            outlier_ejection.observe("a", 1.0, ratio, 0.0, spread)
        for number, ratio in enumerate(_answers(rng, 0.0, 200, spread), 1):
            outlier_ejection.observe("a", 1.0, ratio, 0.0, spread)
            if outlier_ejection.reasons:
                delays.append(number)
                break
    assert len(delays) == 20
    assert max(delays) <= 40


def test_a_rehearsal_lets_nobody_in_again_here() -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 10, 6.0, 1.0)
    dry_run_copy = outlier_ejection.dry_run_copy()
    assert _names(dry_run_copy, FIRST_S - 0.1) == ["b"]
    assert _names(dry_run_copy, FIRST_S) == ["a", "b"]
    assert dry_run_copy.reasons == {}
    assert list(outlier_ejection.reasons) == ["a"]
    assert _names(outlier_ejection, FIRST_S - 0.1) == ["b"]
    # Fed on, the rehearsal has forgotten what was before, and the other has not.
    assert _feed(dry_run_copy, 1, 1.0, 1.0, FIRST_S) == 1.0
    assert list(outlier_ejection.reasons) == ["a"]
