"""The endpoint-picker protocol: bodies in pieces, the subset that is allowed, refusals, answers only shown."""

from __future__ import annotations

import json

import pytest

from backends.health import Health, State
from gateway.rooms.picker.ext_proc_pb2 import ProcessingRequest
from gateway.rooms.picker.stream import ProtocolError
from tests.gateway.rooms.picker.played_proxy import (
    ANSWER,
    BODY,
    CHAT,
    EVENTS,
    FULL_DUPLEX,
    IDLE,
    JSON,
    NONE,
    PlayedObservation,
    PlayedProxy,
    PlayedStream,
    http_headers,
)
from tests.support.waiting import eventually

A, B, FOREIGN = "10.0.0.1:8000", "10.0.0.2:8000", "203.0.113.9:9"
LARGEST_PIECE_BYTES = 64 * 1024
TRAILERS = {"trailers": {"headers": [{"key": "x-checksum", "raw_value": b"0"}]}}
WORDS = b"".join(b'data: {"choices": [{"delta": {"content": "%d"}}]}\n\n' % number for number in range(8))
FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
STREAM = WORDS + FINISH + b"data: [DONE]\n\n"


def chat(text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=False).encode()


def split(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


# The request


@pytest.mark.parametrize(
    ("text", "size"), [("Größe, 大きさ, 🙂", 1), ("Größe, 大きさ, 🙂", 50), ("word " * 60_000, 65_536)]
)
async def test_a_body_in_pieces_comes_back_whole_after_its_end(text: str, size: int) -> None:
    stream, body = PlayedProxy().stream(), chat(text)
    stream.request([("content-length", str(len(body)))])
    for piece in split(body, size):
        stream.piece(piece)
        assert not stream.wire.sent
    stream.body()
    await eventually(lambda: stream.wire.sent)
    assert stream.destinations
    assert b"".join(piece for piece, _ in stream.bodies) == body
    assert max(len(piece) for piece, _ in stream.bodies) <= LARGEST_PIECE_BYTES
    assert [is_last for _, is_last in stream.bodies].index(True) == len(stream.bodies) - 1
    assert stream.set_headers.get("content-length", str(len(body))) == str(len(body))


async def test_trailers_end_a_request_and_its_answer() -> None:
    stream = PlayedProxy().stream()
    stream.request()
    stream.piece(BODY)
    stream.handler.handle(ProcessingRequest(request_trailers=TRAILERS))
    assert stream.bodies == [(BODY, False)]
    assert stream.wire.sent[-1].HasField("request_trailers")
    stream.head()
    stream.answer_piece(ANSWER)
    stream.handler.handle(ProcessingRequest(response_trailers=TRAILERS))
    assert stream.answers == [(ANSWER, False)]
    assert stream.wire.sent[-1].HasField("response_trailers")


async def test_a_request_without_a_body_is_sent_on_and_its_answer_read() -> None:
    proxy = PlayedProxy(model={"policy": {"name": "round_robin"}})
    stored = proxy.picked(path="/v1/responses", body=b'{"model": "m", "input": "x"}')
    stored.head()
    stored.answer(json.dumps({"id": "resp_1", "object": "response", "output": []}).encode())
    stream = proxy.stream()
    stream.request(path="/v1/responses/resp_1", method="GET", is_last=True)
    assert stream.destinations.split(",")[0] == stored.destinations.split(",")[0]
    assert not stream.bodies
    stream.head()
    stream.answer(ANSWER)
    assert proxy.in_flight() == IDLE


async def test_the_last_piece_may_come_twice() -> None:  # as Envoy 1.35 and later may send it
    stream = PlayedProxy().picked()
    sent = len(stream.wire.sent)
    stream.body(BODY)
    assert len(stream.wire.sent) == sent
    stream.head()
    assert stream.wire.sent[-1].HasField("response_headers")


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"no JSON", 400), (b"\xff\xfe{}", 400), (b"", 400), (b"[]", 400), (b'{"model": "none", "messages": []}', 404)],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes, status: int) -> None:
    assert PlayedProxy().picked(body=body).error[0] == status


async def test_headers_that_come_twice_are_refused() -> None:
    stream = PlayedProxy().stream()
    stream.request()
    with pytest.raises(ProtocolError):
        stream.request()


# The subset


@pytest.mark.parametrize(
    ("subset", "destinations"),
    [([A], A), ([FOREIGN, B], B), ([A, B], f"{A},{B}"), (f"{FOREIGN},{B}", B)],
    ids=["one", "one and an unknown one", "two", "a text"],
)
async def test_only_endpoints_of_the_subset_are_picked(subset: list[str] | str, destinations: str) -> None:
    proxy = PlayedProxy(model={"policy": {"name": "least_loaded"}})
    proxy.backends["b"].in_flight = 1
    assert proxy.picked(subset=subset).destinations == destinations


@pytest.mark.parametrize(("subset", "state"), [([FOREIGN], State.UP), ([], State.UP), (None, State.DOWN)])
async def test_where_there_is_no_replica_gives_503(subset: list[str] | None, state: State) -> None:
    proxy = PlayedProxy()
    for backend in proxy.backends.values():
        backend.health = Health(state)
    assert proxy.picked(subset=subset).error[0] == 503


@pytest.mark.parametrize("namespace", ["envoy.lb.subset_hint", "other"])
async def test_an_older_proxy_that_tells_neither_a_subset_nor_modes_has_the_whole_pool(namespace: str) -> None:
    stream = PlayedProxy().stream()
    headers = http_headers([(":method", "POST"), (":path", CHAT), (":authority", "gateway")])
    message = ProcessingRequest(request_headers=headers)
    message.metadata_context.filter_metadata[namespace]["other"] = "value"
    stream.handler.handle(message)
    stream.body(BODY)
    assert stream.destinations == f"{A},{B},10.0.0.3:8000"


# The answer


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("policy", ["round_robin", "learned"])
async def test_events_are_passed_on_at_once_as_they_were(policy: str, size: int) -> None:
    stream = PlayedProxy(model={"policy": {"name": policy}}).picked()
    stream.head(headers=EVENTS)
    for piece in split(STREAM, size):
        stream.answer_piece(piece)
        assert stream.answers[-1] == (piece, False)


@pytest.mark.parametrize("mode", [FULL_DUPLEX, NONE])
async def test_headers_may_end_an_answer(mode: int) -> None:
    proxy = PlayedProxy()
    stream = proxy.picked(mode)
    message = ProcessingRequest(response_headers={"end_of_stream": True})
    message.response_headers.headers.headers.add(key=":status", raw_value=b"204")
    stream.handler.handle(message)
    assert stream.wire.sent[-1].HasField("response_headers")
    assert proxy.in_flight() == IDLE


async def test_an_answer_of_the_proxys_own_is_let_through() -> None:
    stream = PlayedProxy().stream()
    stream.head(503, JSON)
    assert stream.wire.sent[-1].HasField("response_headers")


# Answers that a second filter shows


LEARNED = {"policy": {"name": "learned"}}
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def shown(proxy: PlayedProxy) -> tuple[PlayedStream, PlayedObservation]:
    stream = proxy.picked(NONE)
    return stream, PlayedObservation(proxy, stream)


@pytest.mark.parametrize("order", ["stream, observation", "observation, stream"])
async def test_an_answer_is_learned_from_in_whatever_order_the_streams_begin(order: str) -> None:
    proxy = PlayedProxy(model=LEARNED)
    stream, observation = shown(proxy)
    for name in order.split(", "):
        stream.head(headers=EVENTS) if name == "stream" else observation.head()
    observation.answer(EVENT, EVENT + USAGE, DONE)
    assert observation.handler.has_ended
    stream.handler.close()
    observation.handler.close()
    assert proxy.count("gateway_output_tokens_total") == 2
    assert proxy.count("gateway_requests_total", outcome="ok") == 1
    assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("is_complete", [True, False])
async def test_the_end_may_be_shown_after_the_stream_has_ended_or_not_at_all(is_complete: bool) -> None:
    proxy = PlayedProxy(model=LEARNED)
    stream, observation = shown(proxy)
    stream.head(headers=EVENTS)
    observation.head()
    observation.answer(EVENT, is_complete=False)
    stream.handler.close()
    if is_complete:
        observation.answer(USAGE, DONE)
    observation.handler.close()
    assert not is_complete or proxy.count("gateway_output_tokens_total") == 2
    assert proxy.count("gateway_requests_total", outcome="ok" if is_complete else "cancelled") == 1
    assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("why", ["no policy learns", "it is off", "the request is of another process"])
async def test_nothing_more_is_shown_where_nothing_needs_it(why: str) -> None:
    model = None if why == "no policy learns" else LEARNED
    proxy = PlayedProxy({"picker": {"answers": 0}} if why == "it is off" else None, model=model)
    stream, observation = shown(proxy)
    if why == "the request is of another process":
        observation._name = "unknown"
    observation.head()
    assert observation.handler.has_ended
    observation.handler.close()
    stream.head(headers=EVENTS)
    stream.handler.close()
    assert proxy.count("gateway_requests_total", outcome="ok") == 1
    assert proxy.in_flight() == IDLE
