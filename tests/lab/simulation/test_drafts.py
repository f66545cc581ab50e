"""Acceptance of a method on requests, and the schedules that follow from it."""

from __future__ import annotations

import pytest

from backends.calibration.load import load_calibration
from backends.speculation import Method
from lab.simulation.drafts import best_schedule, mean_context_tokens, tokens_per_step
from lab.simulation.request import ReplayRequest, replay_request
from lab.trace.record import TraceRecord

H100 = load_calibration("llama-3.1-8b-h100")
K5 = {"num_speculative_tokens": 5}


def requests(count: int = 50, **fields: object) -> list[ReplayRequest]:
    record = TraceRecord(prompt_tokens=100, output_tokens=201, temperature=0.0, **fields)  # type: ignore[arg-type]
    return [replay_request(record, 0.0, 0.0)] * count


def test_recorded_steps_are_counted_as_they_would_be_taken() -> None:
    per_step = tokens_per_step(H100, Method.EAGLE3, K5, requests(acceptance={"eagle3": [1, 4, 1]}))
    # The recording repeats 4, 1 from position 1 on: a step of two or of four tokens lands on a 4, one of three on a 1.
    assert per_step == pytest.approx((1.0, 2.0, 2.0, 4.0, 4.0, 4.0), rel=0.03)


def test_unrecorded_requests_are_drawn_by_kind_and_temperature() -> None:
    code, chat, hot = (
        tokens_per_step(H100, Method.EAGLE3, K5, requests(400, workload=kind)) for kind in ("code", "chat", "")
    )
    assert all(one > other for one, other in zip(code[1:], chat[1:], strict=True))
    assert hot == chat  # an unknown kind counts as chat
    rates = H100.acceptance(Method.EAGLE3, "chat").by_position
    assert rates[0] - 0.1 < chat[1] - 1 < rates[0]  # requests that accept little take more of the steps


def test_context_is_that_of_a_request_half_way() -> None:
    assert mean_context_tokens(requests()) == 200.5


def test_methods_whose_drafts_cost_nothing_have_no_schedule() -> None:
    for method in (Method.NGRAM, Method.SUFFIX, Method.MEDUSA, Method.DSPARK):
        assert best_schedule(H100, method, {"num_speculative_tokens": 3}, (1.0, 1.5, 1.8, 2.0), 500.0, 256) == []


def test_the_better_the_acceptance_the_longer_the_drafts() -> None:
    poor, good = (
        best_schedule(H100, Method.EAGLE3, K5, per_step, 300.0, 256)
        for per_step in ((1.0, 1.6, 1.95, 2.15, 2.25, 2.31), (1.0, 1.8, 2.45, 2.95, 3.35, 3.7))
    )
    assert poor[0][2] < good[0][2]
    assert [k for _, _, k in poor] == sorted((k for _, _, k in poor), reverse=True)


def test_one_k_that_is_best_at_every_batch_size_is_said_where_another_is_set() -> None:
    per_step = (1.0, 1.9, 1.91, 1.91, 1.91, 1.91)
    assert best_schedule(H100, Method.EAGLE3, K5, per_step, 300.0, 256) == [(1, 256, 1)]
    assert best_schedule(H100, Method.EAGLE3, {"num_speculative_tokens": 1}, per_step, 300.0, 256) == []


def test_no_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        tokens_per_step(H100, Method.EAGLE3, K5, [])
