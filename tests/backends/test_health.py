"""What follows from evidence of a replica's health, over all sequences of evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.backend import Backend
from backends.engine_metrics import EngineMetrics
from backends.health import (
    SERVING,
    Alone,
    Books,
    Drain,
    Ejected,
    Evidence,
    Health,
    HealthRules,
    Others,
    Probed,
    Served,
    State,
    Strike,
    Unreachable,
    judge,
)
from backends.recovery import Recovery
from backends.speculation import Method

RULES = HealthRules(eject_s=2.0, eject_max_s=10.0, slow_start_s=5.0, stall_s=4.0)
UP = Health(State.UP, "")
ALIVE = Others(1)

engines = st.builds(
    EngineMetrics,
    running=st.integers(0, 1),
    generation_tokens=st.integers(0, 2),
    kv_usage=st.sampled_from([0.0, 0.5]),
)
evidence = st.one_of(
    st.builds(
        Probed,
        st.sampled_from([None, None, "hangs"]),
        st.booleans(),
        st.none() | engines,
        st.booleans(),
        st.booleans(),
        st.builds(Books, st.floats(0, 2), st.floats(0, 70), st.sampled_from([0, 8000])),
    ),
    st.builds(Unreachable, st.just("refused")),
    st.builds(Strike, st.integers(0, 4), st.just("broke off")),
    st.just(Served()),
    st.builds(Ejected, st.floats(0.1, 20.0), st.just("failed elsewhere")),
    st.builds(Drain, st.booleans()),
    st.just(Alone()),
)
others = st.builds(Others, st.integers(0, 2), st.sampled_from([0.0, 4.0, 6.0]), st.integers(0, 1))
histories = st.lists(st.tuples(evidence, others, st.sampled_from([0.0, 0.5, 3.0, 70.0])), min_size=1, max_size=30)


def check_transition(before: Health, given: Evidence, around: Others, after: Health, now_s: float) -> None:
    """Check what holds for each step of any history."""
    changed = after.state is not before.state
    assert after.is_drained == (after.state is State.DRAINING)
    assert len(after.strikes) <= RULES.strikes
    assert not after.strikes or after.state in SERVING
    assert (after.reason == "") == (after.state is State.UP)
    assert after.state is State.UP or after.up_since_s == math.inf
    if before.is_drained:
        assert isinstance(given, Drain) or after == before, "an operator has the last word"
    if not changed:
        assert after.up_since_s == before.up_since_s
        return
    if after.state is State.EJECTED:
        assert before.state in SERVING
        assert around.up, "the last replica that is up is not ejected"
        assert after.ejected_until_s == now_s + after.ejection_s
        if isinstance(given, Strike):
            assert RULES.eject_s <= after.ejection_s <= RULES.eject_max_s or before.ejection_s < RULES.eject_s
            assert before.state is State.RECOVERING or len(before.strikes | {given.request}) == RULES.strikes
    elif after.state is State.DOWN:
        assert isinstance(given, Probed | Unreachable)
        if isinstance(given, Probed) and given.problem is not None and before.state in SERVING:
            assert given.refused or given.is_certain or after.failed_probes >= RULES.failures
        assert not isinstance(given, Probed) or given.problem is not None or after.has_stalled
    elif after.state is State.UP:
        is_proven = isinstance(given, Served) and before.is_on_trial
        assert is_proven or isinstance(given, Alone) or (isinstance(given, Probed) and given.problem is None)
        assert not after.has_stalled
        if before.state is State.EJECTED:
            assert not around.up, "while others are up, it comes back on trial"
    elif after.state is State.RECOVERING:
        assert around.up
        assert after.is_on_trial == (before.state is State.EJECTED or before.has_stalled)
        assert before.state is not State.EJECTED or now_s >= before.ejected_until_s
        assert after.is_on_trial or around.longest_up_s >= RULES.slow_start_s
    else:
        assert isinstance(given, Drain)


@given(histories)
def test_every_transition_is_allowed_and_who_answers_its_probes_comes_back(
    history: list[tuple[Evidence, Others, float]],
) -> None:
    health, now_s = Health(), 100.0
    for given_evidence, around, passes_s in history:
        now_s += passes_s
        after = judge(health, given_evidence, around, RULES, now_s)
        assert judge(health, given_evidence, around, RULES, now_s) == after, "it depends on nothing else"
        check_transition(health, given_evidence, around, after, now_s)
        health = after
    health = judge(health, Drain(False), ALIVE, RULES, now_s)
    for _ in range(4):
        now_s += 70.0  # longer than any ejection, trial or slow start
        health = judge(health, Probed(engine=EngineMetrics()), ALIVE, RULES, now_s)
    assert health.state is State.UP


def after(health: Health, *steps: tuple[float, Evidence], around: Others = ALIVE, rules: HealthRules = RULES) -> Health:
    """Return the health after evidence at given times."""
    for at_s, given_evidence in steps:
        health = judge(health, given_evidence, around, rules, at_s)
    return health


def strikes(*requests: int, at_s: float = 0.0) -> list[tuple[float, Evidence]]:
    return [(at_s, Strike(request, "broke off")) for request in requests]


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ([(0.0, Probed("hangs"))], State.UP),
        ([(0.0, Probed("hangs")), (1.0, Probed())] * 3, State.UP),
        ([(0.0, Probed("hangs")), (1.0, Probed("hangs"))], State.DOWN),
        ([(0.0, Probed("refused", refused=True))], State.DOWN),
        (strikes(1, 2), State.UP),
        (strikes(1, 2, 2, 1), State.UP),  # of two requests
        ([*strikes(1, 2), (0.0, Served()), *strikes(3, 4)], State.UP),
        (strikes(1, 2, 3), State.EJECTED),
        ([*strikes(1, 2, 3), (1.0, Probed())], State.EJECTED),
        ([*strikes(1, 2, 3), (2.0, Probed())], State.RECOVERING),
        ([*strikes(1, 2, 3), (2.0, Probed()), (3.0, Served()), (8.0, Probed())], State.UP),
        ([*strikes(1, 2, 3), (2.0, Probed()), *strikes(4, at_s=3.0)], State.EJECTED),  # one is enough
        ([*strikes(1, 2, 3), (2.0, Probed()), (3.0, Strike(4, "broke off", at_s=1.9))], State.RECOVERING),  # before it
        ([*strikes(1, 2, 3), (2.0, Probed()), (3.0, Alone())], State.UP),
        ([(0.0, Probed(engine=EngineMetrics(running=1))), (4.1, Probed(engine=EngineMetrics(running=1)))], State.DOWN),
        ([(0.0, Probed(engine=EngineMetrics())), (4.1, Probed(engine=EngineMetrics()))], State.UP),
    ],
)
def test_what_follows_from_evidence(steps: list[tuple[float, Evidence]], state: State) -> None:
    assert after(UP, *steps).state is state


def test_a_relapse_takes_a_replica_out_for_twice_as_long() -> None:
    first = after(UP, *strikes(1, 2, 3))
    assert first.ejection_s == 2.0
    back = after(first, (2.0, Probed()))
    assert after(back, *strikes(4, at_s=3.0)).ejection_s == 4.0
    assert after(replace(back, ejection_s=8.0), *strikes(4, at_s=3.0)).ejection_s == 10.0, "at most"
    assert after(back, *strikes(4, at_s=13.0)).ejection_s == 2.0, "it behaved for long enough"


IDLE = EngineMetrics(generation_tokens=9)


@pytest.mark.parametrize(
    ("engine", "books", "state"),
    [
        (IDLE, Books(silent_s=2.1), State.DOWN),  # whatever it says of itself
        (IDLE, Books(silent_s=1.9), State.UP),
        (IDLE, Books(silent_s=4.1, read_s=7.0), State.UP),  # others of ours were answered
        (replace(IDLE, generation_tokens=10), Books(silent_s=4.1), State.UP),  # it works for somebody
        (replace(IDLE, running=1, kv_usage=0.1), Books(silent_s=60.0), State.UP),  # a long prompt, in parts
        (IDLE, Books(silent_s=45.0, prompt_tokens=100_000), State.UP),  # a long prompt at once: 50 s at most
        (IDLE, Books(silent_s=51.0, prompt_tokens=100_000), State.UP),  # so far it has not moved for 10 s
        (replace(IDLE, running=1), Books(read_s=7.0), State.UP),  # its metrics stand still, its answers do not
        (None, Books(silent_s=60.0), State.UP),  # an engine without metrics may be slow
    ],
)
def test_our_own_books_tell_whether_an_engine_stands_still(
    engine: EngineMetrics | None, books: Books, state: State
) -> None:
    before = after(UP, (0.0, Probed(engine=IDLE)), (5.0, Probed(engine=IDLE)))
    assert after(before, (10.0, Probed(engine=engine, books=books))).state is state


def test_a_long_prompt_has_a_bound_too() -> None:
    waiting = Probed(engine=IDLE, books=Books(silent_s=51.0, prompt_tokens=100_000))
    assert after(UP, (0.0, Probed(engine=IDLE)), (101.0, waiting)).state is State.DOWN


def test_an_engine_that_answers_though_its_metrics_stand_still_is_up_again() -> None:
    standing = Probed(engine=EngineMetrics(running=1))
    steps: list[tuple[float, Evidence]] = [(0.0, standing), (5.0, standing), (6.0, Probed("stands still"))]
    assert after(UP, *steps).state is State.DOWN
    assert after(UP, *steps, (7.0, standing)).state is State.DOWN
    proven = replace(standing, is_proven=True)
    assert after(UP, *steps, (7.0, proven), (8.0, Served()), (13.0, proven)).state is State.UP


def test_an_engine_that_stood_still_has_to_serve_a_request_before_it_is_up() -> None:
    """Without requests it looks well: its probes succeed."""
    standing, idle = Probed(engine=EngineMetrics(running=1)), Probed(engine=EngineMetrics())
    back = after(UP, (0.0, standing), (5.0, standing), (6.0, idle))
    assert (back.state, back.is_on_trial) == (State.RECOVERING, True)
    assert not after(back, (7.0, Served())).is_on_trial


@pytest.mark.parametrize(("longest_up_s", "state"), [(5.0, State.RECOVERING), (4.9, State.UP)])
def test_a_replica_that_was_down_starts_slowly_among_others_that_did_not(longest_up_s: float, state: State) -> None:
    back = after(UP, (0.0, Unreachable("refused")), (1.0, Probed()), around=Others(1, longest_up_s))
    assert back.state is state
    assert not back.is_on_trial


def test_a_trial_that_no_request_comes_for_ends_by_itself() -> None:
    on_trial = after(UP, *strikes(1, 2, 3), (2.0, Probed()))
    assert after(on_trial, (61.0, Probed())).is_on_trial
    assert after(on_trial, (63.0, Probed()), around=Others(1, trials=1)).is_on_trial, "it has its request"
    assert not after(on_trial, (63.0, Probed())).is_on_trial


def test_the_share_of_a_replica_that_starts_slowly_grows_with_time_and_weight() -> None:
    backends = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", health=Health(State.UP)) for name in "abc"]
    back, *up = backends
    back.health = Health(State.RECOVERING)
    up[0].in_flight, up[1].in_flight = 8, 12
    recovery = Recovery(slow_start_s=10.0)
    recovery.follow(back)

    def bound_at(now_s: float) -> int:
        for back.in_flight in range(100):
            if back not in recovery.candidates(backends, (), may_try=True, now_s=now_s):
                break
        return back.in_flight

    assert [bound_at(now_s) for now_s in (0.0, 5.0, 10.0)] == [1, 5, 10]
    back.weight = 2.0
    assert bound_at(5.0) == 10
    back.in_flight = 100
    assert recovery.candidates([back], (), may_try=True) == [back], "better than none"
    assert recovery.candidates(backends, ("a",), may_try=True) == up


def test_a_replica_on_trial_gets_one_request_at_a_time() -> None:
    back, up = (Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", health=Health(State.UP)) for name in "ab")
    back.health, recovery = Health(State.RECOVERING, is_on_trial=True), Recovery(slow_start_s=10.0)
    recovery.follow(back)
    assert recovery.candidates([back, up], (), may_try=True) == [back]
    assert recovery.candidates([back, up], (), may_try=False) == [up]
    recovery.begin_trial(back)
    assert recovery.candidates([back, up], (), may_try=True) == [up]
    recovery.end_trial(back)
    assert recovery.candidates([back, up], (), may_try=True) == [back]
