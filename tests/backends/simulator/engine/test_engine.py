"""The step rules: whom they admit, what is drafted, what holds for any workload; test_recorded_steps.py has more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import accumulate, pairwise

import pytest

from backends.backend import EngineLoad
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import k_by_batch
from backends.drafting.script import Script
from backends.simulator.engine.fleet import Completion, EngineStep, Fleet
from backends.speculation import Method
from tests.backends.simulator.engine.fleets import engine_of, next_step, plain, steady, steps_of
from tests.backends.simulator.engine.workloads import Draws, drawn_parameters, drawn_request
from tests.support import step_time
from tests.support.step_time import DRAFTING, STEP, step_s

PLAIN = replace(step_time.PLAIN, step=STEP.model_copy(update={"knee_tokens": 100}))


def load(engine: Fleet) -> EngineLoad:
    return engine.replicas[0].report(0.0)


def formula_s(parameters: EngineParameters, step: EngineStep) -> float:
    drafted = any(emission.drafted for emission in step.emissions)
    return step_s(parameters, step.batch_tokens, step.context_tokens, step.k, len(step.emissions), drafted=drafted)


def totals(steps: list[EngineStep]) -> dict[int, int]:
    tokens_by_id = Counter[int]()
    for step in steps:
        for emission in step.emissions:
            tokens_by_id[emission.request_id] += emission.tokens
    return tokens_by_id


def test_requests_are_admitted_by_priority_and_then_by_arrival() -> None:
    engine = engine_of(replace(PLAIN, max_num_seqs=1))
    ids = [engine.submit_script(0, plain(9, 1), 0.0, priority=each) for each in (2, 1, 2, 0, 1, -1)]
    engine.cancel(ids[2])
    assert [emission.request_id for step in steps_of(engine) for emission in step.emissions] == [
        ids[number] for number in (5, 3, 1, 4, 0)
    ]


def test_a_scheduled_k_counts_prefills_and_is_verified_one_step_later() -> None:
    schedule = k_by_batch([[1, 1, 4], [2, 2, 2], [3, 16, 0]], 4)
    engine = engine_of(replace(PLAIN, drafting=DRAFTING, k=4, k_by_batch=schedule, least_passes=1))
    now_s, seen = 0.0, []
    for arrivals in (1, 0, 1, 0, 1, 0, 0):
        for _ in range(arrivals):
            engine.submit_script(0, steady(10, 30, 4, 5), now_s)
        step = next_step(engine, now_s)
        now_s += step.duration_s
        seen.append((step.k, [emission.drafted for emission in step.emissions]))
    assert seen == [
        (4, [0]),
        (4, [4]),
        (2, [4, 0]),  # a prefill joined: two requests draft 2 each, while the 4 drafted before are verified
        (2, [2, 2]),
        (0, [2, 2, 0]),
        (0, [0, 0, 0]),
        (0, [0, 0, 0]),
    ]


@pytest.mark.parametrize(
    ("method", "passes"),
    [(Method.EAGLE, 1), (Method.MTP, 1), (Method.DSPARK, 5), (Method.NGRAM, 0), (Method.SUFFIX, 0)],
)
def test_a_drafter_runs_although_the_schedule_says_no_drafts(method: Method, passes: int) -> None:
    config = {"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 8, 0]]}
    parameters = EngineParameters.of(load_calibration("llama-3.1-8b-gh200"), method, config)
    engine = engine_of(replace(parameters, step=STEP, drafting=DRAFTING))
    for _ in range(2):
        engine.submit_script(0, steady(10, 30, 5, 6), 0.0)
    engine.step(0.0)
    step = next_step(engine)
    assert (step.k, {emission.drafted for emission in step.emissions}) == (0, {0})
    expected = step_s(replace(PLAIN, step=STEP, drafting=DRAFTING), 2, step.context_tokens, passes, 2, drafted=False)
    assert step.duration_s == pytest.approx(expected)


def test_parameters_come_from_the_calibration_and_the_configuration() -> None:
    calibration = load_calibration("llama-3.1-8b-h100")
    config = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 9, 1]]}
    parameters = EngineParameters.of(calibration, Method.EAGLE, config)
    assert parameters.k_by_batch == (3, *[3] * 8, 1)
    assert parameters.max_num_batched_tokens == calibration.scheduler.max_num_batched_tokens
    assert parameters.kv_blocks < EngineParameters.of(calibration, Method.BASELINE).kv_blocks
    assert EngineParameters.of(calibration, Method.SUFFIX).k == 24
    pard = EngineParameters.of(
        calibration, Method.DRAFT_MODEL, {"num_speculative_tokens": 5, "parallel_drafting": True}
    )
    assert pard.drafting.parallel
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        EngineParameters.of(calibration, Method.EAGLE3, {})


def workload(seed: int) -> tuple[EngineParameters, list[tuple[float, Script]]]:
    """Return an engine, at times with room for hardly anything, and requests with their times."""
    draws = Draws(seed)
    parameters = replace(drawn_parameters(draws), max_num_seqs=1 + seed % 6, max_num_batched_tokens=1 + seed % 79)
    times_s = accumulate(0.1 * draws.random() for _ in range(draws.between(1, 12)))
    return parameters, [(time_s, drawn_request(draws, parameters.k)) for time_s in times_s]


def taken(engine: Fleet, arrivals: list[tuple[float, Script]]) -> Iterator[tuple[EngineStep, float]]:
    """Play a trace, and yield each step with its end."""
    now_s, pending = 0.0, list(arrivals)
    while True:
        while pending and pending[0][0] <= now_s:
            arrived_s, script = pending.pop(0)
            engine.submit_script(0, script, arrived_s)
        if (step := engine.step(now_s)) is not None:
            now_s += step.duration_s
            yield step, now_s
        elif pending:
            now_s = pending[0][0]
        else:
            return


@pytest.mark.parametrize("seed", range(60))
def test_every_workload_is_served_completely_and_within_limits(seed: int) -> None:
    parameters, arrivals = workload(seed)
    engine = engine_of(parameters)
    steps, expected = list[EngineStep](), {at: script.output_tokens for at, (_, script) in enumerate(arrivals)}
    for step, _ in taken(engine, arrivals):
        assert 0 <= load(engine).kv_usage <= 1
        assert load(engine).running <= parameters.max_num_seqs
        assert step.batch_tokens <= parameters.max_num_batched_tokens
        assert step.batch_tokens >= 1, "a step that computes nothing would be taken for ever"
        assert all(1 <= each.tokens <= each.drafted + 1 <= parameters.k + 1 for each in step.emissions)
        assert step.duration_s == pytest.approx(formula_s(parameters, step))
        steps.append(step)
    assert totals(steps) == expected
    assert (load(engine).running, load(engine).waiting, load(engine).kv_usage) == (0, 0, 0)
    assert engine.replicas[0].in_flight == 0
    counters = engine.counters()
    assert counters.generation_tokens == sum(expected.values())
    assert counters.finished == len(expected)
    assert counters.accepted_at.sum() == counters.accepted_tokens
    assert all(later <= earlier for earlier, later in pairwise(counters.accepted_at.tolist()))


@pytest.mark.parametrize("seed", range(60))
def test_virtual_time_agrees_with_stepping_by_hand(seed: int) -> None:
    parameters, arrivals = workload(seed)
    fleet, stepped = engine_of(parameters), engine_of(parameters)
    first_s, ended_s = dict[int, float](), dict[int, float]()
    for step, ends_s in taken(stepped, arrivals):
        for request_id, _, _, _, left in step.emissions:
            first_s.setdefault(request_id, ends_s + parameters.outside_s)
            if not left:
                ended_s[request_id] = ends_s + parameters.outside_s
    completions = list[Completion]()
    for arrived_s, script in arrivals:
        completions += fleet.advance(arrived_s)
        fleet.submit_script(0, script, arrived_s)
    completions = sorted(completions + fleet.advance(math.inf))
    assert [done.output_tokens for done in completions] == [script.output_tokens for _, script in arrivals]
    assert {done.request_id: done.first_s for done in completions} == first_s
    assert {done.request_id: done.ended_s for done in completions} == ended_s
    ours, theirs = fleet.counters(), stepped.counters()
    assert [astuple(ours)[1:], ours.accepted_at.tolist()] == [astuple(theirs)[1:], theirs.accepted_at.tolist()]
    assert sum(done.preemptions for done in completions) == theirs.preemptions
    assert sum(done.cached_tokens for done in completions) == theirs.prefix_hits
