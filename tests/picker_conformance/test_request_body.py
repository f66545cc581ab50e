"""The body of a request on its way through the picker."""

from __future__ import annotations

import contextlib

import pytest

from .answer import Answer
from .data_plane import NoAnswerError, Stream
from .requirement import Source, must, should
from .target import STORED, Target, assert_whole, destinations

LONG_BYTES = 300_000
SENT_BY_ENVOY = 65536
LARGEST_PIECE = 64 * 1024


def split(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


def send(stream: Stream, pieces: list[bytes]) -> None:
    """Send a body in pieces, of which the last one ends it."""
    for piece in pieces[:-1]:
        stream.send_body(piece, end=False)
    stream.send_body(pieces[-1])


def exchange(picker: Target, pieces: list[bytes]) -> Answer:
    """Return the answer to a request whose body comes in pieces."""
    with picker.stream() as stream:
        picker.begin(stream, headers=[*picker.headers, ("content-length", str(sum(map(len, pieces))))])
        send(stream, pieces)
        return stream.request()


@must(Source.STREAMING, "A body in any number of pieces is put together, which may end within a character.")
@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_pieces(picker: Target, size: int) -> None:
    body = picker.chat("Größe, 大きさ, 🙂")
    assert_whole(picker, exchange(picker, split(body, size)), body)


@must(Source.STREAMING, "A body of 300 KB comes back whole, also where it comes in one message.")
@pytest.mark.parametrize("size", [SENT_BY_ENVOY, 1_000_000])
def test_long(picker: Target, size: int) -> None:
    body = picker.chat("word " * (LONG_BYTES // 5))
    assert_whole(picker, exchange(picker, split(body, size)), body)


@should(Source.EXT_PROC, "Pieces of the body that come back are of at most 64 KiB.")
def test_size_of_pieces(picker: Target) -> None:
    answer = exchange(picker, split(picker.chat("word " * (LONG_BYTES // 5)), SENT_BY_ENVOY))
    destinations(answer)
    assert max(answer.pieces) <= LARGEST_PIECE, f"pieces of {sorted(answer.pieces)} bytes"


@must(Source.EXT_PROC, "A content-length, where the picker leaves or sets one, is that of the body that comes back.")
def test_content_length(picker: Target) -> None:
    answer = exchange(picker, split(picker.chat("Größe"), 50))
    assert answer.headers.get("content-length") in (None, [str(len(answer.body))]), (
        f"content-length {answer.headers['content-length']} for {len(answer.body)} bytes"
    )


@must(Source.EXT_PROC, "A message of 0 bytes may end the body.")
def test_empty_end(picker: Target) -> None:
    body = picker.chat()
    assert_whole(picker, exchange(picker, [body, b""]), body)


@must(Source.EXT_PROC, "Trailers may end the body: it comes back without end_of_stream, and the trailers are answered.")
def test_trailers(picker: Target) -> None:
    body = picker.chat()
    with picker.stream() as stream:
        picker.begin(stream)
        stream.send_body(body, end=False)
        stream.send_trailers()
        answer = stream.request()
    assert_whole(picker, answer, body)
    assert not answer.ended, "a piece with end_of_stream came before the trailers"


@must(Source.EXT_PROC, "A body that comes later than the headers is waited for.")
def test_late_body(picker: Target) -> None:
    body = picker.chat()
    with picker.stream() as stream:
        picker.begin(stream)
        early = []
        with contextlib.suppress(NoAnswerError):  # most pickers wait: they pick by the body
            early.append(stream.receive(0.2))
        stream.send_body(body)
        assert_whole(picker, stream.request(early), body)


@must(Source.DESTINATION, "A request without a body is answered at once, with an endpoint or by the picker itself.")
@pytest.mark.parametrize("path", [STORED, "/v1/models"])
def test_without_a_body(picker: Target, path: str) -> None:
    answer = picker.get(path)
    if answer.immediate:
        assert answer.immediate < 500, f"expected an endpoint, got {answer.summary()}"
    else:
        destinations(answer)


@should(
    Source.USERS,
    "The last piece may come twice, as Envoy 1.35 and later may send it: the second is left out.",
)
def test_end_comes_twice(picker: Target) -> None:
    body = picker.chat("word " * 1000)
    pieces = split(body, 2000)
    with picker.stream() as stream:
        picker.begin(stream)
        send(stream, pieces)
        stream.send_body(pieces[-1])
        assert_whole(picker, stream.request(), body)
        stream.send_response_headers(end=True)
        stream.response()
