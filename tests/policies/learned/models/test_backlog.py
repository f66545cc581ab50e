"""The work on a backend: what was sent and has not ended, and its mean over the time that a request met it."""

from __future__ import annotations

import pytest

from policies.learned.models.backlog import Backlog, Share

SHORT, LONG = Share(10.0, 100.0, 50.0), Share(90.0, 900.0, 4000.0)


def test_what_is_sent_is_there_until_it_ends() -> None:
    backlog = Backlog()
    backlog.send(SHORT, 0.0)
    backlog.send(LONG, 0.0)
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (2, 2, 100.0, 1000.0)
    backlog.end(SHORT)
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (1, 1, 90.0, 900.0)
    backlog.end(LONG)
    backlog.end(LONG)  # heard twice
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (0, 0, 0.0, 0.0)


def test_the_mean_load_is_over_time() -> None:
    backlog = Backlog()
    mark = backlog.send(SHORT, 0.0)
    backlog.look(1.0, 1)  # alone for a second
    backlog.send(LONG, 1.0)
    backlog.look(4.0, 2)  # with another for three
    requests, context, prompt_tokens = backlog.since(mark, 4.0)
    assert requests == pytest.approx((1 * 1 + 3 * 2) / 4)
    assert context == pytest.approx((1 * 100 + 3 * 1000) / 4)
    assert prompt_tokens == 4050.0


def test_only_what_came_after_a_mark_counts_for_it() -> None:
    backlog = Backlog()
    backlog.send(LONG, 0.0)
    backlog.look(5.0, 1)
    mark = backlog.send(SHORT, 5.0)
    backlog.look(7.0, 2)
    requests, _, prompt_tokens = backlog.since(mark, 7.0)
    assert requests == pytest.approx(2.0)
    assert prompt_tokens == SHORT.prompt_tokens


def test_other_gateways_requests_count_as_ours_do_on_average() -> None:
    backlog = Backlog()
    mark = backlog.send(SHORT, 0.0)
    backlog.look(0.0, 5)
    backlog.look(2.0, 5)
    requests, context, _ = backlog.since(mark, 2.0)
    assert (requests, context) == pytest.approx((5.0, 500.0))


def test_an_end_that_was_never_heard_is_forgotten_when_nothing_is_there() -> None:
    backlog = Backlog()
    backlog.send(LONG, 0.0)
    backlog.look(3.0, 0)
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (0, 0, 0.0, 0.0)


def test_a_clock_that_stands_still_or_goes_back_does_no_harm() -> None:
    backlog = Backlog()
    mark = backlog.send(SHORT, 10.0)
    backlog.look(10.0, 1)
    backlog.look(9.0, 1)
    requests, context, _ = backlog.since(mark, 10.0)
    assert requests >= 1.0
    assert context >= 0.0
