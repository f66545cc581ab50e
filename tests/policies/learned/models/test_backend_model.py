"""The backlog of a backend: its unfinished requests, and its mean load over the lifetime of a request."""

from __future__ import annotations

import pytest

from policies.learned.models.backend_model import Backlog
from tests.support.work import work

SHORT, LONG = work(10.0, 100.0, 50.0), work(90.0, 900.0, 4000.0)


def test_a_request_counts_until_it_ends() -> None:
    backlog = Backlog()
    backlog.send(SHORT, 0.0)
    backlog.send(LONG, 0.0)
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (2, 2, 100.0, 1000.0)
    backlog.end(SHORT)
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (1, 1, 90.0, 900.0)
    backlog.end(LONG)
    backlog.end(LONG)  # reported twice
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (0, 0, 0.0, 0.0)


def test_the_mean_load_is_a_time_average() -> None:
    backlog = Backlog()
    mark = backlog.send(SHORT, 0.0)
    backlog.update(1.0, 1)  # alone for a second
    backlog.send(LONG, 1.0)
    backlog.update(4.0, 2)  # with another for three
    requests, context, prompt_tokens = backlog.since(mark, 4.0)
    assert requests == pytest.approx((1 * 1 + 3 * 2) / 4)
    assert context == pytest.approx((1 * 100 + 3 * 1000) / 4)
    assert prompt_tokens == 4050.0


def test_only_load_after_a_mark_counts() -> None:
    backlog = Backlog()
    backlog.send(LONG, 0.0)
    backlog.update(5.0, 1)
    mark = backlog.send(SHORT, 5.0)
    backlog.update(7.0, 2)
    requests, _, prompt_tokens = backlog.since(mark, 7.0)
    assert requests == pytest.approx(2.0)
    assert prompt_tokens == SHORT.prompt_tokens


def test_requests_of_other_gateways_count_with_the_mean_work() -> None:
    backlog = Backlog()
    mark = backlog.send(SHORT, 0.0)
    backlog.update(0.0, 5)
    backlog.update(2.0, 5)
    requests, context, _ = backlog.since(mark, 2.0)
    assert (requests, context) == pytest.approx((5.0, 500.0))


def test_requests_without_an_end_are_dropped_when_the_backend_is_idle() -> None:
    backlog = Backlog()
    backlog.send(LONG, 0.0)
    backlog.update(3.0, 0)
    assert (backlog.requests, backlog.sent, backlog.steps, backlog.context_tokens) == (0, 0, 0.0, 0.0)


def test_a_stopped_or_backward_clock_is_harmless() -> None:
    backlog = Backlog()
    mark = backlog.send(SHORT, 10.0)
    backlog.update(10.0, 1)
    backlog.update(9.0, 1)
    requests, context, _ = backlog.since(mark, 10.0)
    assert requests >= 1.0
    assert context >= 0.0


def test_a_mark_of_the_backend_that_had_the_name_before_is_harmless() -> None:
    before = Backlog()
    before.send(work(steps=50.0, context_tokens=400.0, prompt_tokens=300.0), now_s=0.0)
    before.update(now_s=100.0, requests=5)
    mark = before.send(work(steps=50.0, context_tokens=400.0, prompt_tokens=300.0), now_s=100.0)
    requests, context, prompts = Backlog().since(mark, now_s=101.0)
    assert (requests, context, prompts) == (1.0, 0.0, 0.0)
