"""The evidence for advice, by what `learned` was shown."""

from __future__ import annotations

import pytest

from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence
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
