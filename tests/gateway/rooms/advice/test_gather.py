"""The evidence for advice, by what `learned` was shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.rooms.advice.advise import advise
from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence
from gateway.rooms.advice.losing_method import of_speculation
from gateway.rooms.advice.room import add_learned
from tests.policies.learned.pool import STEP_S, Pool, request


def gathered(pool: Pool) -> ModelEvidence:
    named = tuple(BackendEvidence(each.name, each.method, each.num_speculative_tokens) for each in pool.backends)
    return add_learned(ModelEvidence("m", named), pool.policy, pool.backends)


def taught() -> Pool:
    pool = Pool()
    pool.teach(request("code"), ngram=3.0, suffix=1.5, eagle3=2.0)
    return pool


def test_the_steps_and_the_load_are_those_that_answers_met() -> None:
    for each in gathered(taught()).backends:
        assert each.steps is not None
        assert 30.0 < each.steps.answers <= 40.0, "older ones count less"
        assert each.steps.seconds == pytest.approx(STEP_S, rel=0.03)
        assert each.steps.fitted_s == pytest.approx(STEP_S, rel=0.1)
        requests, context_tokens, prompt_work = each.steps.load
        assert requests == pytest.approx(1.0)
        assert 200.0 < context_tokens < 500.0
        assert prompt_work == pytest.approx(0.0), "no other prompt came meanwhile"


def test_kinds_have_their_tokens_and_who_answered_them() -> None:
    pool = taught()
    for _ in range(20):
        pool.send("ngram", request("chat"), per_step=1.2)
    code, chat = gathered(pool).kinds
    assert (code.tokens, chat.tokens) == (40 * 4 * 150.0, 20 * 150.0)
    assert code.sent == {each.name: pytest.approx(0.25) for each in pool.backends}
    assert chat.sent == {"ngram": 1.0}
    assert code.tokens_per_step == pytest.approx(
        {"baseline": 1.0, "ngram": 3.0, "suffix": 1.5, "eagle3": 2.0}, rel=0.08
    )


def test_of_a_replica_that_was_sent_nothing_nothing_is_said() -> None:
    pool = taught()
    pool.backends.append(replace(pool.backends[-1], name="new"))
    evidence = gathered(pool)
    assert evidence.backends[-1].steps is None
    assert {each.rule for each in advise(evidence)} == {"experiment"}
    assert of_speculation(evidence).gain is not None
    pool.policy.assess(request("code"), pool.backends)  # now it is known, and idle
    assert gathered(pool).backends[-1].steps is None
    assert of_speculation(gathered(pool)).gain == of_speculation(evidence).gain


def test_what_a_gateway_was_told_is_evidence_after_its_restart() -> None:
    before, pool = taught(), Pool()
    pool.now_s, statistics = before.now_s, before.policy.statistics
    for name, epoch in statistics.take_changed():
        rows = {row.key: row.sums for row in statistics.own_of(name, epoch)}
        pool.policy.statistics.set_others_of(name, epoch, rows)
    pool.policy.assess(request("code"), pool.backends)
    pool.fit()
    now, then = gathered(pool), gathered(before)
    for each, other in zip(now.backends, then.backends, strict=True):
        assert each.steps is not None
        assert other.steps is not None
        assert each.steps.load == pytest.approx(other.steps.load)
        assert each.steps.seconds == pytest.approx(other.steps.seconds)
    assert [kind.tokens for kind in now.kinds] == [kind.tokens for kind in then.kinds]
