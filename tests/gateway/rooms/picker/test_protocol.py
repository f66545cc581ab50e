"""The endpoint-picker protocol: bodies in any pieces, the subset that the proxy allows, and refusals."""

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
    PlayedProxy,
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
        stream.handler.handle(ProcessingRequest(request_body={"body": piece}))
        assert not stream.wire.sent
    stream.body()
    await eventually(lambda: stream.wire.sent)
    assert stream.destinations
    assert b"".join(piece for piece, _ in stream.bodies) == body
    assert max(len(piece) for piece, _ in stream.bodies) <= LARGEST_PIECE_BYTES
    assert [is_last for _, is_last in stream.bodies].index(True) == len(stream.bodies) - 1
    assert stream.set_headers.get("content-length", str(len(body))) == str(len(body))


async def test_the_bodies_of_requests_at_once_are_kept_apart() -> None:
    proxy = PlayedProxy()
    bodies = [chat(f"request {number}") for number in range(50)]
    streams = [proxy.stream() for _ in bodies]
    for stream, body in zip(streams, bodies, strict=True):
        stream.request()
        stream.handler.handle(ProcessingRequest(request_body={"body": body[:30]}))
    for stream, body in reversed(list(zip(streams, bodies, strict=True))):
        stream.body(body[30:])
    assert [b"".join(piece for piece, _ in stream.bodies) for stream in streams] == bodies


async def test_trailers_end_a_request_and_its_answer() -> None:
    stream = PlayedProxy().stream()
    stream.request()
    stream.handler.handle(ProcessingRequest(request_body={"body": BODY}))
    stream.handler.handle(ProcessingRequest(request_trailers=TRAILERS))
    assert stream.bodies == [(BODY, False)]
    assert stream.wire.sent[-1].HasField("request_trailers")
    stream.head()
    stream.handler.handle(ProcessingRequest(response_body={"body": ANSWER}))
    stream.handler.handle(ProcessingRequest(response_trailers=TRAILERS))
    *_, body, trailers = stream.wire.sent
    assert body.response_body.response.body_mutation.streamed_response.body == ANSWER
    assert not body.response_body.response.body_mutation.streamed_response.end_of_stream
    assert trailers.HasField("response_trailers")


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
    "body", [b"no healthy upstream", b'{"model": "cut off', b"\xff\xfe{}", b"", b"[]", b"null", b"1"]
)
async def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    assert PlayedProxy().picked(body=body).error[0] == 400


async def test_a_request_for_no_model_of_the_pool_is_refused() -> None:
    assert PlayedProxy().picked(body=b'{"model": "none", "messages": []}').error[0] == 404


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


@pytest.mark.slow
@pytest.mark.parametrize("subset", [[FOREIGN], []])
async def test_a_subset_without_a_replica_gives_503(subset: list[str]) -> None:
    assert PlayedProxy().picked(subset=subset).error[0] == 503


async def test_a_pool_without_a_replica_gives_503() -> None:
    proxy = PlayedProxy()
    for backend in proxy.backends.values():
        backend.health = Health(State.DOWN)
    assert proxy.picked().error[0] == 503


@pytest.mark.parametrize("namespace", ["envoy.lb.subset_hint", "other"])
async def test_an_older_proxy_that_tells_neither_a_subset_nor_modes_has_the_whole_pool(namespace: str) -> None:
    stream = PlayedProxy().stream()
    message = ProcessingRequest(
        request_headers=http_headers([(":method", "POST"), (":path", CHAT), (":authority", "gateway")])
    )
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
        stream.handler.handle(ProcessingRequest(response_body={"body": piece}))
        assert stream.wire.sent[-1].response_body.response.body_mutation.streamed_response.body == piece


@pytest.mark.parametrize("mode", [FULL_DUPLEX, NONE])
async def test_headers_may_end_an_answer(mode: int) -> None:
    proxy = PlayedProxy()
    stream = proxy.picked(mode)
    message = ProcessingRequest(response_headers={"end_of_stream": True})
    message.response_headers.headers.headers.add(key=":status", raw_value=b"204")
    stream.handler.handle(message)
    assert stream.wire.sent[-1].HasField("response_headers")
    assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_of_the_engine_comes_back_as_it_was(status: int) -> None:
    stream = PlayedProxy().picked()
    stream.head(status, [("content-type", "text/plain")])
    stream.answer(b"upstream connect error")
    answers = [message.response_body.response.body_mutation.streamed_response for message in stream.wire.sent[-2:]]
    assert [(piece.body, piece.end_of_stream) for piece in answers] == [(b"upstream connect error", False), (b"", True)]


async def test_an_answer_of_the_proxys_own_is_let_through() -> None:
    stream = PlayedProxy().stream()
    stream.head(503, JSON)
    assert stream.wire.sent[-1].HasField("response_headers")
