"""What newer engines do: long prompts, a limited drafter, admission of whole sequences, asynchronous scheduling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from backends.calibration.batch_schedule import decode_step_s
from backends.calibration.load import load_calibration
from backends.calibration.parameters import ASYNCHRONOUS, EngineParameters
from backends.drafter_limit import Beyond, DrafterLimit
from backends.drafting.script import Script
from backends.simulator.engine.fleet import EngineStep, Fleet, SimulatedReplica
from backends.simulator.engine.state import UNCUT
from backends.speculation import Method
from tests.backends.simulator.engine.fleets import H100, engine_of, plain, steady, steps_of
from tests.support.step_time import DRAFTING, PLAIN, STEP, step_s

DRAFTS = replace(PLAIN, drafting=DRAFTING, k=3)


def accepting(prompt: int, output: int) -> Script:
    """Return a script that accepts all of three drafts, whichever token a step starts at."""
    return steady(prompt, output, 3, 4)


def test_a_chunk_costs_by_the_pairs_that_it_attends_to_and_context_more_if_it_is_not_split() -> None:
    usual = replace(DRAFTS, max_num_batched_tokens=100)
    long = replace(usual, step=STEP.model_copy(update={"per_attended_s": 1e-8, "per_unsplit_token_s": 1e-6}))
    taken = []
    for parameters in (usual, long):
        engine = engine_of(parameters)
        engine.submit_script(0, accepting(250, 9), 0.0)
        taken.append(steps_of(engine))
    share = 1 + DRAFTING.verify_share  # in steps that draft
    more = [later.duration_s - before.duration_s for before, later in zip(*taken, strict=True)]
    token_s = 1e-6 - STEP.per_context_token_s
    chunks = [1e-8 * 100 * 50, 1e-8 * 100 * 150, share * 1e-8 * 50 * 225]
    assert more == pytest.approx([*chunks, share * token_s * 250, share * token_s * 254])
    expected = decode_step_s(long, np.array([1.0]), 3, 254.0)
    assert taken[1][-1].duration_s == pytest.approx(expected[0])


ASKED = {UNCUT: 3, 0: 0, 1: 1, 3: 3, 7: 3}
"""Depths that requests ask for, and what they get of three drafted tokens."""


def drafted_of(steps: list[EngineStep]) -> list[list[int]]:
    """Return the tokens drafted for each request of `ASKED` by its steps."""
    return [
        [each.drafted for step in steps for each in step.emissions if each.request_id == number]
        for number in range(len(ASKED))
    ]


def test_each_request_of_a_batch_is_drafted_as_deep_as_it_asks() -> None:
    engine = engine_of(DRAFTS)
    for depth in ASKED:
        engine.submit_script(0, accepting(20, 61), 0.0, depth=depth)
    steps = steps_of(engine)
    drafted = drafted_of(steps)
    assert [max(each) for each in drafted] == list(ASKED.values())
    assert [len(each) for each in drafted] == [16, 61, 31, 16, 16]
    assert engine.counters().draft_tokens == sum(map(sum, drafted))
    # Less is verified, and as much is drafted.
    assert steps[1].batch_tokens == 5 + sum(ASKED.values())
    for number, step in enumerate(steps[:10]):
        expected = step_s(DRAFTS, step.batch_tokens, step.context_tokens, 3, 5, drafted=number > 0)
        assert step.duration_s == pytest.approx(expected)


def test_drawn_steps_are_as_deep_as_asked() -> None:
    engine = Fleet([SimulatedReplica("a", H100, Method.EAGLE3, {"num_speculative_tokens": 3})])
    for depth in ASKED:
        engine.submit(0, 20, 200, 0.0, depth=depth)
    drafted = drafted_of(steps_of(engine))
    assert [max(each) for each in drafted] == list(ASKED.values())
    assert len(drafted[1]) == 200


@pytest.mark.parametrize(
    ("beyond", "tokens", "drafted", "silent"),
    [
        # Prompts of 20 and 30 tokens; the second request crosses 40 tokens at its tenth.
        (None, [[1, 1], [4, 4], [4, 4], [4, 4]], [[0, 0], [3, 3], [3, 3], [3, 3]], []),
        (Beyond.WORSE, [[1, 1], [4, 4], [4, 4], [4, 4]], [[0, 0], [3, 3], [3, 3], [3, 3]], []),
        # The step that computes tokens 35 to 38 leaves no room for three more: dummies follow, without drafting.
        (Beyond.BATCH, [[1, 1], [4, 4], [4, 4], [1, 1]], [[0, 0], [3, 3], [3, 3], [3, 3]], [2, 3]),
        (Beyond.NONE, [[1, 1], [4, 4], [4, 4], [4, 1]], [[0, 0], [3, 3], [3, 3], [3, 0]], []),
    ],
)
def test_beyond_the_limit_of_the_drafter(
    beyond: Beyond | None, tokens: list[list[int]], drafted: list[list[int]], silent: list[int]
) -> None:
    limit = None if beyond is None else DrafterLimit(40, beyond)
    parameters = replace(DRAFTS, drafter_limit=limit)
    engine = engine_of(parameters)
    engine.submit_script(0, accepting(20, 60), 0.0)
    engine.submit_script(0, accepting(30, 60), 0.0)
    steps = steps_of(engine, 4)
    assert [[each.tokens for each in step.emissions] for step in steps] == tokens
    assert [[each.drafted for each in step.emissions] for step in steps] == drafted
    assert engine.counters().draft_tokens == sum(map(sum, drafted))
    for number, step in enumerate(steps[:2] if beyond is Beyond.NONE else steps):
        k = 0 if number in silent else 3
        expected = step_s(parameters, step.batch_tokens, step.context_tokens, k, 2, drafted=number > 0)
        assert step.duration_s == pytest.approx(expected)


def test_a_batch_recovers_when_the_long_request_has_left_and_none_where_it_would_crash() -> None:
    engine = engine_of(replace(DRAFTS, drafter_limit=DrafterLimit(40)))
    engine.submit_script(0, accepting(20, 17), 0.0)
    engine.submit_script(0, accepting(38, 3), 0.0)
    tokens = [[each.tokens for each in step.emissions] for step in steps_of(engine)]
    assert tokens == [[1, 1], [1, 1], [1, 1], [1], [4], [4], [4], [1]]
    engine = engine_of(replace(DRAFTS, drafter_limit=DrafterLimit(40, Beyond.CRASH)))
    engine.submit_script(0, accepting(20, 17), 0.0)
    with pytest.raises(ValueError, match="38 tokens of prompt and output exceed the limit of 37"):
        engine.submit_script(0, accepting(20, 18), 0.0)


@pytest.mark.parametrize(("reserves", "preempted"), [(False, True), (True, False)])
def test_a_request_is_admitted_only_if_its_whole_sequence_fits(reserves: bool, preempted: bool) -> None:
    parameters = replace(PLAIN, max_num_batched_tokens=64, kv_blocks=24, reserves_sequence=reserves)
    engine = engine_of(parameters)
    for _ in range(3):
        engine.submit_script(0, plain(128, 40), 0.0)
    steps_of(engine)
    assert (engine.counters().preemptions > 0) is preempted
    assert engine.counters().finished == 3


@pytest.mark.parametrize(("asynchronous", "first"), [(False, 3), (True, 4)])
def test_a_request_joins_the_step_after_the_next(asynchronous: bool, first: int) -> None:
    """The second step of a request is running when another one arrives, which joins the third or the fourth."""
    engine = engine_of(replace(PLAIN, asynchronous=asynchronous))
    engine.submit_script(0, plain(10, 9), 0.0)
    alone = engine_of(PLAIN)
    alone.submit_script(0, plain(10, 9), 0.0)
    ends_s = np.cumsum([step.duration_s for step in steps_of(alone)]).tolist()
    arrived_s = (ends_s[0] + ends_s[1]) / 2
    engine.advance(arrived_s)
    request = engine.submit_script(0, plain(10, 1), arrived_s)
    ended_s = {done.request_id: done.ended_s for done in engine.advance(math.inf)}[request]
    assert ends_s[first - 2] < ended_s < ends_s[first - 1] + 0.01
    assert ended_s > ends_s[first - 1]


def test_an_idle_engine_does_not_wait_and_newer_settings_are_on_by_default() -> None:
    engine = engine_of(replace(PLAIN, asynchronous=True))
    waits_s = []
    for at_s in (0.0, 1.0):
        engine.advance(at_s)
        engine.submit_script(0, plain(10, 1), at_s)
        waits_s += [done.ttft_s for done in engine.advance(at_s + 0.9)]
    waits_s += [done.ttft_s for done in engine.advance(math.inf)]
    assert waits_s == pytest.approx([waits_s[0]] * 2)
    for method in (Method.BASELINE, Method.EAGLE3, Method.SUFFIX, Method.NGRAM):
        parameters = EngineParameters.of(H100, method, {"num_speculative_tokens": 3} if method else None)
        assert parameters.reserves_sequence
        assert parameters.asynchronous is (method in ASYNCHRONOUS) is (method not in (Method.SUFFIX, Method.NGRAM))
    assert not EngineParameters.of(load_calibration("tiny-cpu"), Method.BASELINE).asynchronous  # vLLM's choice on CPUs


def test_a_request_takes_longer_than_its_steps_by_what_is_outside_of_them() -> None:
    took_s = []
    for outside_s in (0.5, 0.0):
        engine = engine_of(replace(PLAIN, outside_s=outside_s))
        engine.submit_script(0, plain(10, 5), 0.0)
        took_s += [(done.ttft_s, done.e2e_s) for done in engine.advance(math.inf)]
    assert np.subtract(took_s[0], took_s[1]) == pytest.approx([0.5, 0.5])


def test_the_limit_of_a_drafter_is_that_of_the_config_or_of_the_head() -> None:
    config = {"num_speculative_tokens": 3}
    assert EngineParameters.of(H100, Method.EAGLE3, config).drafter_limit == DrafterLimit(2048, Beyond.WORSE)
    assert EngineParameters.of(H100, Method.NGRAM, config).drafter_limit is None
    shorter = EngineParameters.of(H100, Method.MTP, config | {"max_model_len": 900})
    assert shorter.drafter_limit == DrafterLimit(900, Beyond.CRASH)
    given = DrafterLimit(5000)
    assert EngineParameters.of(H100, Method.EAGLE3, config, drafter_limit=given).drafter_limit == given
