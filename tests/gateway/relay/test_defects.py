"""What raises beside an exchange costs neither its answer, nor its place, nor the time-outs of others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from backends import background
from backends.http.receiver import UpstreamError
from gateway.relay.context import Timeouts
from gateway.relay.observers import Observer
from gateway.rooms.recorder.document import RequestNotes
from gateway.routing import lookups
from gateway.routing.routed_request import RoutedRequest
from gateway.telemetry.series import Count, Family
from policies.policy import Policy
from tests.gateway.relay.test_attempts import DONE, FIRST, SECOND, Relay

USAGE = b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    counts: list[str] = []
    monkeypatch.setattr(background, "on_failure", [counts.append])
    return counts


def broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError


class Follows:
    """A follower that raises, or whose observers do, when they are told of the end."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        return broken() if self.raises else RequestNotes(broken, keeps_answer=False)


def stream(relay: Relay) -> bytes:
    """Send a request, answer it with a stream, and return what the client got."""
    _, reply = relay.send()
    receiver = relay.begin_stream("a")
    for event in (FIRST, SECOND, USAGE, DONE):
        receiver.on_data(event)
    receiver.on_end()
    assert reply.ended
    return reply.body


def test_followers_and_observers_that_raise_cost_nothing(counted: list[str]) -> None:
    relay = Relay("a")
    relay.context.followers = {"m": [Follows(raises=True), Follows(raises=False)]}
    assert stream(relay) == FIRST + SECOND + USAGE + DONE
    assert counted == ["observers"] * 2
    assert relay.in_flight() == [0] * 4


@pytest.mark.parametrize("series", ["keys", "step_tokens"])
def test_a_request_that_cannot_be_accounted_for_gives_up_its_place(
    series: str, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = Relay("a")
    monkeypatch.setattr(relay.metrics, series, Family(SimpleNamespace(labels=broken), Count))
    assert stream(relay).endswith(DONE)
    assert counted == ["accounting"]
    assert relay.in_flight() == [0] * 4


@pytest.mark.parametrize("is_retry", [False, True])
def test_a_request_that_cannot_be_sent_is_answered_and_keeps_no_place(is_retry: bool) -> None:
    relay = Relay("a", "b")
    if is_retry:
        _, reply = relay.send()
    narrowing = SimpleNamespace(narrow=lambda _, them: them, choosing=lambda policy: policy.choose, depth=broken)
    relay.context.router.narrow_by({"m": narrowing})
    if is_retry:
        relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
    else:
        _, reply = relay.send()
    assert (reply.status, reply.code) == (500, "gateway_failed")
    assert relay.in_flight() == [0] * 5


def test_a_failure_that_cannot_be_judged_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay("a", "b")
    _, reply = relay.send()
    monkeypatch.setattr(Policy, "prices_limits", property(broken))  # not compiled by mypyc, so it can be patched
    relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
    assert (reply.status, reply.code, relay.in_flight()) == (500, "gateway_failed", [0] * 5)


def test_a_body_that_is_nested_too_deeply_to_be_changed_is_the_fault_of_its_client() -> None:
    relay = Relay("a")
    relay.model.upstreams["a"].habits.may_ask = True
    deep = b"[" * 300 + b"]" * 300
    body = b'{"messages": [], "stream": true, "stream_options": {"include_usage": false}, "x": %b}' % deep
    _, reply = relay.send(body)
    assert (reply.status, reply.code) == (400, "invalid_json")
    assert relay.in_flight() == [0] * 4


async def test_a_client_that_leaves_before_its_question_is_refused_is_no_failure(
    counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "PER_MINUTE", 0)
    relay = Relay("a", "b")
    before = asyncio.all_tasks()
    exchange, _ = relay.send(b'{"previous_response_id": "resp_1"}', "/v1/responses")
    exchange.client_gone()
    await asyncio.wait(asyncio.all_tasks() - before)
    assert counted == []
    assert relay.in_flight() == [0] * 5


def test_an_exchange_that_cannot_be_ended_keeps_no_other_from_its_time_out(
    counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = Relay("a")
    relay.context.timeouts = Timeouts(first_byte_s=0.0, idle_s=0.0)
    replies = []
    for _ in range(8):  # a set has no order
        monkeypatch.setattr(relay.send()[1], "whole", broken)
        replies.append(relay.send()[1])
    relay.context.sweep()
    assert {reply.status for reply in replies} == {504}
    assert counted == ["requests"] * 8
    last = relay.send()[1]
    relay.context.stop()
    assert last.status == 503
