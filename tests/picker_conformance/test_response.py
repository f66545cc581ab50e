"""The answer of the endpoint on its way through the picker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from .answer import Answer
from .data_plane import Stream, StreamEndedError
from .requirement import Source, must
from .target import FOREIGN, STORED, Target, destinations
from .test_request_body import LONG_BYTES, split

JSON = b'{"id": "1", "choices": [{"message": {"content": "Gr\xc3\xb6\xc3\x9fe"}}], "usage": {"completion_tokens": 3}}'
EVENTS = [b'data: {"choices": [{"delta": {"content": "word %d"}}]}\n\n' % number for number in range(8)]
SSE = "text/event-stream"
LAST = b"data: [DONE]\n\n"


@contextlib.contextmanager
def taking_part() -> Iterator[None]:
    """Skip a test whose picker ends the stream in an orderly way: then the data plane goes on without it."""
    try:
        yield
    except StreamEndedError as end:
        if end.code.name == "OK":
            pytest.skip("the picker leaves answers alone: it ended the stream in an orderly way")
        raise


def answered(stream: Stream) -> Answer:
    """Return what comes back of the answer, which has been sent to its end."""
    with taking_part():
        return stream.response()


def passed_on(picker: Target, pieces: list[bytes], content_type: str = "application/json", status: int = 200) -> Answer:
    """Return what comes back of an answer in pieces, of which the last one ends it."""
    with picker.stream() as stream:
        served = picker.picked(stream)[0]
        stream.send_response_headers(content_type, status=status, served=served)
        for piece in pieces[:-1]:
            stream.send_response_body(piece, end=False)
        stream.send_response_body(pieces[-1])
        return answered(stream)


@must(
    Source.SERVED, "The endpoint that served may be the picked one, a fallback, missing or unknown: the answer goes on."
)
@pytest.mark.parametrize("which", ["picked", "fallback", "missing", "unknown", "no endpoint"])
def test_served_endpoint(picker: Target, which: str) -> None:
    with picker.stream() as stream:
        picked = picker.picked(stream)
        served = {"picked": picked[0], "fallback": picked[-1], "unknown": FOREIGN, "no endpoint": "none"}.get(which)
        stream.send_response_headers(served=served)
        stream.send_response_body(JSON)
        answered(stream).assert_body(JSON)
    picker.assert_serves()


@must(Source.STREAMING, "The body of an answer comes back as it was, in one piece or in many.")
@pytest.mark.parametrize(
    "pieces", [[JSON], split(JSON, 9), [JSON, b""], [b""]], ids=["one", "many", "empty end", "empty"]
)
def test_body(picker: Target, pieces: list[bytes]) -> None:
    passed_on(picker, pieces).assert_body(b"".join(pieces))


@must(Source.STREAMING, "An answer of 300 KB comes back whole.")
def test_long(picker: Target) -> None:
    body = b'{"data": "' + b"0123456789" * (LONG_BYTES // 10) + b'"}'
    passed_on(picker, split(body, 16_384)).assert_body(body)


@must(Source.STREAMING, "A stream of events comes back event by event: each one before the next is there.")
def test_each_event_at_once(picker: Target) -> None:
    with picker.stream() as stream, taking_part():
        served = picker.picked(stream)[0]
        stream.send_response_headers(SSE, served=served)
        back = stream.begun_response()
        for event in EVENTS:
            stream.send_response_body(event, end=False)
            while not back.body.endswith(event):
                back.take(stream.receive())
        stream.send_response_body(LAST)
        while not back.ended:
            back.take(stream.receive())
    back.assert_body(b"".join(EVENTS) + LAST)


@must(Source.STREAMING, "A stream of events comes back as it was, wherever its pieces end.")
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_in_pieces(picker: Target, size: int) -> None:
    body = b"".join(EVENTS) + LAST
    passed_on(picker, split(body, size), SSE).assert_body(body)


@must(Source.EXT_PROC, "Headers may end an answer.")
def test_without_a_body(picker: Target) -> None:
    with picker.stream() as stream:
        served = picker.picked(stream)[0]
        stream.send_response_headers(status=204, end=True, served=served)
        answered(stream).assert_body(b"")


@must(Source.EXT_PROC, "Trailers may end an answer: its body comes back without end_of_stream, and they are answered.")
@pytest.mark.parametrize("content_type", ["application/json", SSE])
def test_trailers(picker: Target, content_type: str) -> None:
    body = JSON if content_type != SSE else EVENTS[0] + LAST
    with picker.stream() as stream:
        served = picker.picked(stream)[0]
        stream.send_response_headers(content_type, served=served)
        stream.send_response_body(body, end=False)
        stream.send_response_trailers()
        answer = answered(stream)
    answer.assert_body(body)
    assert not answer.ended, "a piece with end_of_stream came before the trailers"


@must(Source.EXT_PROC, "Errors of the endpoint come back as they were.")
@pytest.mark.parametrize("status", [400, 500])
def test_error(picker: Target, status: int) -> None:
    body = b"upstream connect error"
    passed_on(picker, [body], "text/plain", status).assert_body(body)


@must(Source.EXT_PROC, "The answer to a request without a body comes back as it was.")
def test_after_a_get(picker: Target) -> None:
    with picker.stream() as stream:
        stream.send_headers(STORED, picker.headers, end=True)
        destinations(stream.request())
        stream.send_response_headers()
        stream.send_response_body(JSON)
        answered(stream).assert_body(JSON)


@must(Source.EXT_PROC, "An answer without a request, such as one of Envoy's own, is answered, or the stream is ended.")
def test_without_a_request(picker: Target) -> None:
    with picker.stream() as stream:
        stream.send_response_headers("text/plain", status=503, end=True)
        try:
            kind = stream.receive().WhichOneof("response")
        except StreamEndedError:
            return
        assert kind in ("response_headers", "immediate_response"), f"expected response_headers, got {kind}"
