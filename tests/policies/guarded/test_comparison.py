"""The interval of the gain covers the true ratio, whenever one looks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.guarded.guardrail import Guardrail
from policies.policy import GuardrailSettings

SHARE = 0.1
NEVER_FREEZES = GuardrailSettings(share=SHARE, tolerance=100.0)


def _run(seed: int, requests: int, ratio: float, confidence: float) -> tuple[bool, float]:
    """Return whether every interval of a run held the true ratio, and the width of the last one, as a ratio."""
    rng = np.random.default_rng(seed)
    guardrail = Guardrail(NEVER_FREEZES)
    logs, control = rng.normal(-4.0, 0.5, requests), rng.random(requests) < SHARE
    held, found = True, guardrail.comparison(confidence)
    for log, by_control in zip(logs, control, strict=True):
        guardrail.observe(math.exp(log if by_control else log + math.log(ratio)), control=bool(by_control))
        found = guardrail.comparison(confidence)
        held &= math.isnan(found.low) or found.low <= ratio <= found.high
    return held, found.high / found.low


def test_it_holds_the_true_ratio_at_all_times_at_least_as_often_as_it_says() -> None:
    """60 runs, looked at after each of 1,200 requests. At 80%, P(fewer than 40 hold) is below 0.01."""
    runs = [_run(seed, 1200, 0.8, 0.8) for seed in range(60)]
    assert sum(held for held, _ in runs) >= 40
    widths = [width for _, width in runs]
    assert max(widths) < 1.4, "it is of use: with 120 requests of the control group, within 18% of the ratio"


def test_it_is_narrower_with_more_requests_and_wider_with_more_confidence() -> None:
    few, many = _run(1, 800, 0.8, 0.95)[1], _run(1, 6000, 0.8, 0.95)[1]
    assert many < few
    assert _run(1, 800, 0.8, 0.99)[1] > few


def test_it_holds_exactly_the_ratios_that_the_test_does_not_reject() -> None:
    """The guardrail freezes at the moment when the interval at its confidence leaves the tolerated ratio behind."""
    guardrail = Guardrail(GuardrailSettings(share=SHARE, tolerance=0.0, confidence=0.99))
    rng = np.random.default_rng(3)
    low = math.nan
    while not guardrail.frozen:
        low = guardrail.comparison(0.99).low
        assert math.isnan(low) or low <= 1.0
        by_control = bool(rng.random() < SHARE)
        guardrail.observe(math.exp(rng.normal(0.0, 0.5) + (0.0 if by_control else 0.15)), control=by_control)
    assert low > 0.98, "it was about to leave 1 behind"


def test_there_is_none_with_few_requests() -> None:
    guardrail = Guardrail(NEVER_FREEZES)
    found = guardrail.comparison(0.95)
    assert math.isnan(found.ratio)
    for _ in range(39):
        guardrail.observe(0.01, control=True)
    for _ in range(100):
        guardrail.observe(0.02, control=False)
    found = guardrail.comparison(0.95)
    assert found.ratio == pytest.approx(2.0)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
