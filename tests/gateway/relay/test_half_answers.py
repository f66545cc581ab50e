"""Answers that their engine gives up, and what a full engine says: what the client sees, who is blamed, what counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.engine_metrics import EngineMetrics
from backends.health import State
from backends.http.receiver import AnswerHead
from tests.gateway.relay.test_attempts import (
    ANSWER,
    CHAT,
    CHOICE,
    DONE,
    EVENTS_HEAD,
    FIRST,
    JSON_HEAD,
    USAGE,
    Relay,
    body_of,
)

MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
END = b"data: [DONE]\n\n"


def event(document: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(document).encode()


ABORTED = event({"choices": [{**CHOICE, "finish_reason": "abort"}], "usage": USAGE})
HALF = {
    CHAT: {"choices": [{**CHOICE, "finish_reason": "abort"}], "usage": USAGE},
    EMBEDDINGS: {"data": [{}], "usage": USAGE},
}


def answer_whole(relay: Relay, name: str, document: object, *, is_read_at_once: bool) -> None:
    body = json.dumps(document).encode()
    if is_read_at_once:
        relay.receiver(name).on_whole(AnswerHead(200, JSON_HEAD), body)  # type: ignore[attr-defined]
    else:
        relay.answer(name, body)


@pytest.mark.parametrize("is_read_at_once", [True, False])
@pytest.mark.parametrize("path", HALF)
def test_half_an_answer_in_one_piece_is_tried_elsewhere_and_is_a_strike(path: str, is_read_at_once: bool) -> None:
    relay = Relay("a", "b")
    for number in range(3):
        assert relay.backends["a"].health.state is State.UP
        _, reply = relay.send(json.dumps({"model": "m", "input": ["x", "y"], "seed": number}).encode(), path)
        answer_whole(relay, "a", HALF[path], is_read_at_once=is_read_at_once)
        assert reply.chunks == []
        relay.answer("b", ANSWER.replace(b"[{}]", b"[{}, {}]"))
        assert (reply.status, reply.headers["x-gateway-retried-from"]) == (200, "a")
    assert relay.backends["a"].health.state is State.EJECTED
    assert relay.count("gateway_requests_total", backend="a", outcome="ok") == 0
    assert relay.count("gateway_key_tokens_total") == 30, "only whole answers are charged"


def test_a_long_answer_that_is_given_up_is_cut_before_its_end() -> None:
    for last, is_whole in (
        (b'"finish_reason": "stop"}]}', True),
        (b'"finish_reason": "abort"}]}', False),
        (b"", False),
    ):
        relay = Relay("a")
        _, reply = relay.send()
        receiver, text = relay.receiver("a"), b'{"choices": [{"message": {"content": "%b"}, ' % (b"x" * (1 << 20))
        receiver.on_head(200, JSON_HEAD)
        receiver.on_data(text)
        receiver.on_data(last)
        receiver.on_end()
        assert (reply.ended, reply.aborted) == (is_whole, not is_whole)
        assert (reply.body == text + last) is is_whole


def stream(relay: Relay, name: str, *events: bytes) -> None:
    """Stream events from a backend, as long as the exchange wants them, and end."""
    receiver, backend = relay.receiver(name), relay.backends[name]
    receiver.on_head(200, EVENTS_HEAD)
    for each in events:
        if backend.in_flight:
            receiver.on_data(each)
    if backend.in_flight:
        receiver.on_end()


def outcomes(relay: Relay) -> dict[str, float]:
    names = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled")
    counts = {name: relay.count("gateway_requests_total", outcome=name) for name in names}
    return {name: count for name, count in counts.items() if count}


STREAMED = {
    "aborted": [FIRST, ABORTED, END],
    "without a reason": [FIRST, event({"choices": [{"index": 0, "delta": {}, "finish_reason": None}]}), END],
    "in one read": [FIRST + ABORTED + END],
}


@pytest.mark.parametrize("events", STREAMED.values(), ids=STREAMED)
def test_half_a_stream_ends_with_an_error_event_and_is_a_strike(events: list[bytes]) -> None:
    relay = Relay("a", "b")
    for number in range(3):
        _, reply = relay.send(body_of(number))
        stream(relay, "a", *events)
        assert reply.body.startswith(FIRST)
        assert b'"finish_reason": "abort"' not in reply.body
        assert b'"code":"backend_broken"' in reply.body
        assert reply.body.endswith(END)
        assert (reply.body.count(END), reply.ended) == (1, True)
    assert outcomes(relay) == {"interrupted": 3}
    assert relay.backends["a"].health.state is State.EJECTED
    assert relay.count("gateway_key_tokens_total") < 30, "it is not charged as a whole answer"


def test_half_a_stream_of_which_nothing_has_been_passed_on_goes_elsewhere() -> None:
    for events in ([ABORTED, END], [END], [event({"error": "no memory"}), END]):
        relay = Relay("a", "b")
        _, reply = relay.send()
        stream(relay, "a", *events)
        assert reply.chunks == []
        stream(relay, "b", FIRST, DONE)
        assert (reply.body, outcomes(relay)) == (FIRST + DONE, {"ok": 1})


ERRORS: list[tuple[str, list[bytes], str]] = [
    (CHAT, [event({"error": {"message": "no code"}}), END], "engine_error"),
    (CHAT, [event({"error": {"message": "your fault", "code": 400}}), END], "client_error"),
    (MESSAGES, [b"event: error\n" + event({"type": "error", "error": {"type": "api_error"}})], "engine_error"),
    (RESPONSES, [b"event: response.failed\n" + event({"type": "response.failed", "response": {}})], "engine_error"),
]


@pytest.mark.parametrize(("path", "events", "outcome"), ERRORS)
def test_an_error_that_the_engine_names_itself_is_passed_on_as_it_is(
    path: str, events: list[bytes], outcome: str
) -> None:
    relay = Relay("a", "b")
    _, reply = relay.send(path=path)
    stream(relay, "a", FIRST, *events)
    assert (reply.body, reply.ended) == (b"".join([FIRST, *events]), True)
    assert outcomes(relay) == {outcome: 1}
    strikes = len(relay.backends["a"].health.strikes)
    assert strikes == (outcome == "engine_error")


@pytest.mark.parametrize(
    ("kind", "whole", "cut"),
    [
        (b"text/event-stream", b"data: [1]\n\ndata: {}\n\n", b'data: {"text": "a'),
        (b"text/event-stream", b"data: {}", b"data: {"),
        (b"application/x-ndjson", b"{}\n{}", b'{}\n{"text": '),
    ],
)
def test_a_stream_of_another_endpoint_that_ends_within_an_event_is_cut(kind: bytes, whole: bytes, cut: bytes) -> None:
    for data, is_whole in ((whole, True), (whole + b"\n" + cut, False)):
        relay = Relay("a")
        _, reply = relay.send(path="/v1/audio/speech")
        relay.receiver("a").on_head(200, [(b"content-type", kind)])
        relay.receiver("a").on_data(data)
        relay.receiver("a").on_end()
        assert (reply.ended, reply.aborted) == (is_whole, not is_whole)


# Load

VLLM_IS_FULL = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a '
    b'different instance.","type":"Service Unavailable","param":null,"code":503}}'
)


def refuse(relay: Relay, name: str, status: int, body: bytes = VLLM_IS_FULL, headers: Any = ()) -> None:
    relay.receiver(name).on_head(status, [*JSON_HEAD, *headers])
    relay.receiver(name).on_data(body)
    relay.receiver(name).on_end()


def busy(relay: Relay) -> list[str]:
    return [name for name, backend in relay.backends.items() if backend.in_flight]


@pytest.mark.parametrize("full", [1, 2])
@pytest.mark.parametrize("status", [429, 503])
def test_what_is_full_passes_a_request_on_until_one_is_free_and_is_not_ejected(status: int, full: int) -> None:
    relay = Relay("a", "b", "c")
    for number in range(40):  # far more than the retry budget has
        _, reply = relay.send(body_of(number))
        for _ in range(full):
            (name,) = busy(relay)
            refuse(relay, name, status)
        assert reply.chunks == []
        (name,) = busy(relay)
        relay.answer(name)
        assert (reply.status, reply.headers["x-gateway-backend"]) == (200, name)
        assert reply.headers["x-gateway-retried-from"] != name
    assert {backend.health.state for backend in relay.backends.values()} == {State.UP}
    assert relay.count("gateway_retries_total", kind="busy") == 40 * full
    assert outcomes(relay) == {"ok": 40}


@pytest.mark.parametrize("status", [429, 503])
def test_where_all_are_full_the_client_is_told_so_by_the_last(status: int) -> None:
    relay = Relay("a", "b", "c")
    _, reply = relay.send()
    while names := busy(relay):
        refuse(relay, names[0], status, headers=[(b"retry-after", b"7")])
    assert (reply.status, reply.body, reply.headers["retry-after"]) == (status, VLLM_IS_FULL, "7")


@pytest.mark.parametrize("is_event", [True, False])
def test_an_engine_that_calls_itself_full_while_it_has_nothing_to_do_is_sick(is_event: bool) -> None:
    for running, state in ((0, State.EJECTED), (5, State.UP)):
        relay = Relay("a", "b", "c")
        relay.backends["a"].engine.metrics = EngineMetrics(running=running)
        for number in range(3):
            relay.send(body_of(number))
            if is_event:
                relay.begin_stream("a", b"data: " + VLLM_IS_FULL + b"\n\n" + END)
            else:
                refuse(relay, "a", 503)
            relay.answer(busy(relay)[0])
        assert relay.backends["a"].health.state is state
