"""The test whether a drafter is silent, its delay, false alarms, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import Backend, EngineChange
from backends.speculation import Method
from policies.guarded.silent_drafters import REST_S, SilentDrafters

ARM = "eagle3:3"
NOTHING = ((), 1.0, 1.0, False, 0.0)


def observe(drafters: SilentDrafters, *observed: float, expected: float | None = 2.4, now_s: float = 0.0) -> int:
    """Observe answers of backend `a`; return how many observations may be learned."""
    return sum(len(drafters.observe("a", ARM, expected, each, now_s, NOTHING)) for each in observed)


def silenced() -> SilentDrafters:
    drafters = SilentDrafters()
    observe(drafters, *[1.0] * 6)
    assert list(drafters.silent) == ["a"]
    return drafters


def test_six_answers_without_a_draft_accepted_show_it_and_are_not_learned() -> None:
    drafters = SilentDrafters()
    assert observe(drafters, 2.5, 1.9, 3.0) == 3
    assert observe(drafters, *[1.0] * 5) == 0
    assert not drafters.silent
    assert observe(drafters, 1.05) == 0
    assert list(drafters.silent) == ["a"]
    assert observe(drafters, 1.0, 1.0) == 0


def test_what_was_held_back_is_learned_once_drafts_are_accepted() -> None:
    drafters = SilentDrafters()
    assert observe(drafters, 1.0, 1.0, 2.4) == 0
    assert observe(drafters, 2.4) == 4


@pytest.mark.parametrize("expected", [None, 1.1])
def test_requests_of_which_nothing_is_expected_are_no_evidence(expected: float | None) -> None:
    drafters = SilentDrafters()
    assert observe(drafters, *[1.0] * 100, expected=expected) == 100
    assert drafters.silent == {}


def test_the_cause_is_the_change_after_which_nothing_was_accepted() -> None:
    causes = []
    for before, after in (((), ()), ((2.4,), ()), ((), (2.4,))):
        drafters = SilentDrafters()
        observe(drafters, *before)
        drafters.renew("a", EngineChange.WAKE_UP)
        observe(drafters, *after, *[1.0] * 12)
        causes.append(drafters.silent["a"].cause)
    assert causes == ["since_wake_up", "since_wake_up", "unknown"]


def test_two_answers_in_a_row_with_drafts_accepted_bring_it_back() -> None:
    drafters = silenced()
    observe(drafters, 2.4, 1.0, 2.4)
    assert list(drafters.silent) == ["a"]
    assert observe(drafters, 2.4) == 1
    assert drafters.silent == {}


def test_a_change_of_the_engine_gives_it_another_chance() -> None:
    drafters = silenced()
    assert drafters.renew("a", EngineChange.RESTART)
    assert drafters.silent == {}
    assert not drafters.renew("b", EngineChange.RESTART)


def test_it_rests_after_each_quiet_answer_unless_all_do() -> None:
    drafters = silenced()
    pool = [Backend(name, "m", Method.EAGLE3, "http://x", num_speculative_tokens=3) for name in "ab"]
    assert [each.name for each in drafters.admitted(pool, 1.0)] == ["b"]
    assert drafters.admitted(pool[:1], 1.0) == pool[:1]
    assert [each.name for each in drafters.admitted(pool, REST_S)] == ["a", "b"]
    observe(drafters, 1.0, now_s=REST_S)
    assert [each.name for each in drafters.admitted(pool, REST_S + 1)] == ["b"]


def test_an_arm_that_is_often_quiet_needs_more_evidence() -> None:
    """As MTP with k = 1 on short answers: a third of the answers is quiet although the drafter works."""
    rng = np.random.default_rng(3)
    drafters = SilentDrafters()
    for number, quiet in enumerate(rng.random(20_000) < 0.3):
        backend = "ab"[number % 2]
        drafters.observe(backend, ARM, 1.5, 1.0 if quiet else 1.6, 0.0)
        if number > 500:
            assert not drafters.silent, number
    answers = 0
    while not drafters.silent:
        observe(drafters, 1.0, expected=1.5)
        answers += 1
    assert 8 <= answers <= 25
