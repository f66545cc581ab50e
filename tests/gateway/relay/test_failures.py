"""What follows from a failure, over all combinations of kinds and situations."""

from __future__ import annotations

from itertools import product

import pytest

from gateway.relay.failures import RULES, Blame, Has, Notice, Outlook, Situation, Step, verdict_on

SITUATIONS = [
    Situation(has, one, two, three, four, five, six, outlook, is_proof, is_first)
    for has in Has
    for one, two, three, four, five, six, is_proof, is_first in product((False, True), repeat=8)
    for outlook in Outlook
]
"""All of them: 2,304 for each kind of failure."""


@pytest.mark.parametrize("kind", RULES)
def test_a_request_is_sent_elsewhere_only_while_the_client_has_nothing_and_once(kind: str) -> None:
    retried = [now for now in SITUATIONS if verdict_on(kind, now).step is Step.RETRY]
    for now in retried:
        assert now.has is Has.NOTHING
        assert not now.was_retried or kind in {"busy", "length"}, "each that has no room costs nothing"
        assert now.may_move
        assert now.has_other
        assert now.may_repeat or kind in {"connect", "key", "model"}, "another may have had an effect"
    assert bool(retried) is (kind not in {"timeout", "redirect", "exhausted", "stalled"})
    costs_nothing = any(not (now.has_budget or now.is_on_trial) for now in retried)
    assert costs_nothing is (kind in {"connect", "down", "trial", "key", "model", "busy", "length"})


@pytest.mark.parametrize("kind", RULES)
def test_a_stream_that_has_begun_goes_on_only_if_it_can_be_rescued(kind: str) -> None:
    for now in SITUATIONS:
        step = verdict_on(kind, now).step
        if step is Step.GO_ON:
            assert (now.has, now.outlook, now.has_other) == (Has.PART, Outlook.ELSEWHERE, True)
        elif step is Step.CLOSE:
            assert (now.has, now.outlook) == (Has.PART, Outlook.END)
    can_go_on = Situation(Has.PART, outlook=Outlook.ELSEWHERE)
    is_rescued = verdict_on(kind, can_go_on).step is Step.GO_ON
    assert is_rescued is (kind in {"connect", "broken", "garbage", "refused", "error", "down", "stalled"})


@pytest.mark.parametrize("kind", RULES)
def test_nothing_that_comes_after_the_last_event_matters(kind: str) -> None:
    for now in SITUATIONS:
        verdict = verdict_on(kind, now)
        assert (verdict.step is Step.COMPLETE) is (now.has is Has.ALL)
        if now.has is Has.ALL:
            assert verdict.blame is Blame.NEVER


@pytest.mark.parametrize("kind", RULES)
def test_a_failure_is_a_strike_only_where_it_is_evidence(kind: str) -> None:
    for now in SITUATIONS:
        verdict = verdict_on(kind, now)
        if kind in {"connect", "down"} and verdict.step is Step.RETRY:
            assert verdict.blame is Blame.NEVER, "the pool knows by itself"
        if kind in {"busy", "length"}:
            assert verdict.blame is Blame.NEVER or now.has is not Has.NOTHING, "load is no sickness"
        if verdict.step is Step.RETRY and kind in {"broken", "garbage", "status", "error"}:
            assert verdict.blame is Blame.IF_SERVED, "the request may be the cause"
        if verdict.step is Step.GO_ON:
            assert verdict.blame is (Blame.IF_SERVED if now.is_proof else Blame.NEVER)
        if verdict.blame is Blame.NOW and verdict.step is not Step.RETRY:
            assert now.is_proof
            assert now.is_first_suspect, "a request that several failed is evidence against none"
            assert not verdict.lacks_budget, "another one might have failed it too"


@pytest.mark.parametrize("kind", RULES)
def test_the_lack_of_budget_is_told_only_if_nothing_else_kept_the_request_here(kind: str) -> None:
    for now in SITUATIONS:
        if verdict_on(kind, now).lacks_budget:
            assert not now.has_budget
            allowed = Situation(**{**{name: getattr(now, name) for name in Situation.__slots__}, "has_budget": True})
            assert verdict_on(kind, allowed).step is Step.RETRY


def test_what_the_pool_is_told() -> None:
    told = {report: {kind for kind, rule in RULES.items() if rule.report is report} for report in Notice}
    assert told == {
        Notice.NOTHING: {"down", "trial", "redirect", "exhausted", "stalled", "busy", "length"},
        Notice.FAILURE: {"broken", "garbage", "refused", "status", "error", "key", "model"},
        Notice.UNREACHABLE: {"connect"},
        Notice.TIMEOUT: {"timeout"},
    }
