"""Adaptive verification: the drafts that an engine chooses to verify, and what it reports of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from backends.calibration.calibration import Acceptance, Calibration, Kind
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.drafting.script import Script
from backends.simulator.engine import draws, verification
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from tests.backends.simulator.engine.fleets import next_step, steady, steps_of

FLASH = load_calibration("deepseek-v4-flash-mi350x")
K = 4
FIXED = {"num_speculative_tokens": K}
ADAPTIVE = FIXED | {"enable_adaptive_verification": True}
RATES = (0.9, 0.6, 0.5, 0.2)


def knowing(window: float | None, rates: tuple[float, ...] = RATES, **costs: float) -> Calibration:
    """Return the calibration with an acceptance of its own, which the engine knows as well as the window says."""
    acceptance = Acceptance(by_position=rates, request_spread=0.0, confidence_window=window, source="made up")
    dspark = FLASH.method(Method.DSPARK).model_copy(update={"acceptance": {Kind.CHAT: acceptance}})
    step = FLASH.step.model_copy(update=costs)
    return FLASH.model_copy(update={"methods": {**FLASH.methods, Method.DSPARK: dspark}, "step": step})


def fleet_of(config: dict[str, Any], calibration: Calibration, **limits: Any) -> Fleet:
    parameters = replace(EngineParameters.of(calibration, Method.DSPARK, config), **limits)
    return Fleet([SimulatedReplica("a", calibration, Method.DSPARK, config, parameters=parameters)])


def accepting(output: int, accepted: int) -> Script:
    """Return the script of a request all of whose drafts are accepted up to a position."""
    return steady(20, output, K, accepted + 1)


def expected_per_second(calibration: Calibration, verified: tuple[int, ...]) -> float:
    """Return the tokens per second that an engine expects if it verifies so many drafts of each request."""
    step, drafting = calibration.step, calibration.method(Method.DSPARK).drafting
    requests = len(verified)
    tokens = requests + sum(verified)
    below = min(tokens, step.knee_tokens)
    step_s = step.base_s + step.per_token_below_knee_s * below + step.per_token_above_knee_s * (tokens - below)
    step_s += (step.per_request_s + 8192 * step.per_context_token_s) * tokens  # as many dummy requests, of that context
    step_s += drafting.base_s + drafting.per_pass_s + drafting.per_request_s * requests
    survives = np.cumprod(RATES)
    return float((requests + sum(survives[:count].sum() for count in verified)) / step_s)


def test_an_engine_verifies_what_gives_the_most_tokens_per_second() -> None:
    totals = set[int]()
    for token_s in (4e-5, 4e-4, 2e-3, 0.1):
        calibration = knowing(None, base_s=9e-3, per_token_below_knee_s=token_s, per_request_s=0.0)
        fleet = fleet_of(ADAPTIVE, calibration)
        for _ in range(3):
            fleet.submit_script(0, accepting(50, K), 0.0)
        fleet.step(0.0)
        decoded = next_step(fleet, 1.0)
        choices = product(range(K + 1), repeat=3)
        best = max(choices, key=lambda verified: expected_per_second(calibration, verified))
        verified = [emission.tokens - 1 for emission in decoded.emissions]  # these scripts accept all of a draft
        assert sorted(verified) == sorted(best)
        assert decoded.batch_tokens == 3 + sum(best)
        totals.add(sum(best))
    assert totals >= {0, 3 * K}
    assert len(totals) == 4, "each case is another choice"


def test_drafts_that_are_left_out_count_as_drafted_and_hold_what_a_step_emits() -> None:
    fleet = fleet_of(ADAPTIVE, knowing(None, per_token_below_knee_s=1.0))
    fleet.submit_script(0, accepting(9, K), 0.0)
    for number, step in enumerate(steps_of(fleet)):
        assert [emission.tokens for emission in step.emissions] == [1]
        assert step.batch_tokens == (1 if number else 20)
    counters = fleet.counters()
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (8, 8 * K, 0)  # as vLLM counts them


@pytest.mark.parametrize("scripted", [False, True])
def test_confidence_is_what_becomes_true(scripted: bool) -> None:
    calibration = knowing(0.5, (0.6,))
    fleet = fleet_of(ADAPTIVE, calibration)
    fleet.submit(0, 10, 10, 0.0)
    state = fleet._state
    request, confidences, accepted = state.requests[0], [], []
    request["profile"] = fleet._profile_for(0, "chat", 0.0)
    rng = np.random.default_rng(3)
    for sent in range(1, 20_000):
        request["sent"] = sent
        if scripted:
            is_accepted = bool(rng.random() < 0.6)
            confidences.append(verification._confidence(state, request, 0, 0.6, int(is_accepted)))
        else:
            is_accepted = draws.uniform(request["key"], 2 * sent) < 0.6
            confidences.append(verification._confidence(state, request, 0, 0.6, -1))
        accepted.append(is_accepted)
    by_confidence = list[tuple[float, float]]()
    drawn, became = np.array(confidences), np.array(accepted)
    for low in np.arange(0.0, 1.0, 0.2):
        chosen = (drawn >= low) & (drawn <= low + 0.2)
        if chosen.sum() > 500:
            by_confidence.append((drawn[chosen].mean(), became[chosen].mean()))
    assert len(by_confidence) >= 4
    for confidence, share in by_confidence:
        assert share == pytest.approx(confidence, abs=0.04)
    assert became.mean() == pytest.approx(0.6, abs=0.02)


def test_the_request_with_the_better_drafts_gets_more_of_the_budget() -> None:
    """A window that tells everything: of two requests, the one whose drafts will be accepted has them verified."""
    fleet = fleet_of(ADAPTIVE, knowing(1e-6, per_token_below_knee_s=2e-3, per_request_s=0.0))
    good = fleet.submit_script(0, accepting(50, K), 0.0)
    bad = fleet.submit_script(0, accepting(50, 0), 0.0)
    second = steps_of(fleet, 2)[-1]
    assert {each.request_id: each.tokens for each in second.emissions} == {good: K + 1, bad: 1}
    assert second.batch_tokens == 2 + K
