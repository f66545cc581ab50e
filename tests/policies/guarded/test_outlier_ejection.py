"""Outliers are ejected, readmitted, and ejected for longer when they relapse."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.guarded.outlier_ejection import FIRST_S, LONGEST_S, SLOWNESS_HALF_LIFE_S, OutlierEjection

POOL = [Backend(name, "m", Method.EAGLE3, "http://x", num_speculative_tokens=3) for name in ("a", "b")]


def _names(outlier_ejection: OutlierEjection, now_s: float) -> list[str]:
    return [candidate.name for candidate in outlier_ejection.admit(POOL, now_s)]


def _feed(
    outlier_ejection: OutlierEjection, times: int, step: float | None, acceptance: float | None, now_s: float = 0.0
) -> float:
    slowness = 1.0
    for _ in range(times):
        slowness = outlier_ejection.observe("a", step, acceptance, now_s)
    return slowness


def test_a_normal_backend_is_not_ejected() -> None:
    outlier_ejection = OutlierEjection()
    for step, acceptance in [(1.0, 1.0), (1.3, 0.8), (0.8, 1.2), (1.1, None), (None, 0.9), (None, None)] * 20:
        outlier_ejection.observe("a", step, acceptance, 0.0)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]
    assert outlier_ejection.reasons == {}


@pytest.mark.parametrize(("step", "acceptance", "reason"), [(6.0, 1.0, "steps"), (1.0, 0.25, "tokens per step")])
def test_slow_steps_and_low_acceptance_lead_to_ejection(step: float, acceptance: float, reason: str) -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 5, step, acceptance)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]  # the evidence does not suffice yet
    _feed(outlier_ejection, 5, step, acceptance)
    assert _names(outlier_ejection, 0.0) == ["b"]
    assert reason in outlier_ejection.reasons["a"]


def test_one_stall_does_not_lead_to_ejection() -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 20, 1.0, 1.0)
    _feed(outlier_ejection, 1, 1000.0, 0.001)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]


def test_an_ejection_ends_in_time_and_earlier_outcomes_are_forgotten() -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 10, 6.0, 1.0)
    _feed(outlier_ejection, 30, 6.0, 1.0)  # requests that were in flight at the ejection
    assert _names(outlier_ejection, FIRST_S - 0.1) == ["b"]
    assert _names(outlier_ejection, FIRST_S) == ["a", "b"]
    _feed(outlier_ejection, 1, 1.0, 1.0, FIRST_S + 1)
    assert _names(outlier_ejection, FIRST_S + 1) == ["a", "b"]


def test_an_ejected_backend_does_not_count_as_slow() -> None:
    """Otherwise it would get no requests, and could not show that it has recovered."""
    outlier_ejection = OutlierEjection()
    assert _feed(outlier_ejection, 5, 6.0, 1.0) > 3
    assert _feed(outlier_ejection, 15, 6.0, 1.0) == 1.0


def test_relapses_double_the_ejection_and_recovery_resets_it() -> None:
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


def test_if_all_backends_are_ejected_all_are_admitted() -> None:
    outlier_ejection = OutlierEjection()
    for name in ("a", "b"):
        for _ in range(10):
            outlier_ejection.observe(name, 6.0, 1.0, 0.0)
    assert set(outlier_ejection.reasons) == {"a", "b"}
    assert _names(outlier_ejection, 1.0) == ["a", "b"]


def test_slowness_is_measured_below_the_ejection_threshold() -> None:
    outlier_ejection = OutlierEjection()
    assert _feed(outlier_ejection, 10, 1.1, 1.0) == 1.0
    assert _feed(outlier_ejection, 20, 2.0, 1.0) == pytest.approx(2.0, rel=0.05)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]


def test_unconfirmed_slowness_decays() -> None:
    outlier_ejection = OutlierEjection()
    slow = _feed(outlier_ejection, 20, 2.0, 1.0)
    values = [
        outlier_ejection.slowness("a", after_s)
        for after_s in (0.0, SLOWNESS_HALF_LIFE_S, 2 * SLOWNESS_HALF_LIFE_S, 100 * SLOWNESS_HALF_LIFE_S)
    ]
    assert values == pytest.approx([slow, 1 + (slow - 1) / 2, 1 + (slow - 1) / 4, 1.0])
    assert _feed(outlier_ejection, 1, 2.0, 1.0, 50 * SLOWNESS_HALF_LIFE_S) == pytest.approx(slow, rel=0.01)  # confirmed
    assert outlier_ejection.slowness("never seen", 0.0) == 1.0


def _answers(rng: np.random.Generator, share: float, count: int, spread: float) -> list[float]:
    """Draw ratios of tokens per step to an expected 2.5: skewed, at least one token, a few very high."""
    logs = rng.gamma(2.0, spread / 2**0.5, count) - spread * 2**0.5  # mean 0, this spread, a long right tail
    expected = 2.5
    return [max(1.0, 1.0 + share * (expected * math.exp(log) - 1.0)) / expected for log in logs]


@pytest.mark.parametrize("spread", [0.15, 0.35, 0.55])
def test_faulty_backends_are_ejected_and_healthy_ones_not_at_any_spread(spread: float) -> None:
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


def test_looking_up_what_is_admitted_ends_no_ejection() -> None:
    outlier_ejection = OutlierEjection()
    _feed(outlier_ejection, 10, 6.0, 1.0)
    admitted = [[one.name for one in outlier_ejection.admitted(POOL, now_s)] for now_s in (FIRST_S - 0.1, FIRST_S)]
    assert admitted == [["b"], ["a", "b"]]
    assert list(outlier_ejection.reasons) == ["a"]
    assert _names(outlier_ejection, FIRST_S - 0.1) == ["b"]


def test_without_ejection_slowness_is_still_measured() -> None:
    outlier_ejection = OutlierEjection(ejects=False)
    assert _feed(outlier_ejection, 20, 6.0, 1.0) == pytest.approx(6.0, rel=0.05)
    assert _names(outlier_ejection, 0.0) == ["a", "b"]
