from itertools import combinations
from typing import Any, cast

import pytest

from backends.http.address import Address
from backends.http.client import Call, Connection, UpstreamClient
from tests.backends.http.test_client import Recorder

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = (b"3\r\nab\n\r\n", b"02\r\n\r\n\r\n", b"4;a=1\r\n5\r\nx\r\n", b"1\r\nZ\r\n")
BODY = b"ab\n\r\n5\r\nxZ"
LAST = b"0\r\n\r\n"


class Transport:
    """Takes what is written, and is never closed by the other side."""

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


async def received(pieces: list[bytes]) -> Recorder:
    """Return what comes of an answer that is read in pieces."""
    recorder, connection = Recorder(), Connection(UpstreamClient(Address.parse("http://127.0.0.1:1")))
    connection.connection_made(cast("Any", Transport()))
    connection.carry(Call(b"", b"", recorder))
    for piece in pieces:
        if not connection.closed:
            connection.data_received(piece)
    return recorder


@pytest.mark.slow
async def test_chunks_are_the_same_wherever_they_are_cut() -> None:
    chunks = b"".join(CHUNKS) + LAST
    for cuts in combinations(range(len(chunks) + 1), 3):
        ends = [*cuts, len(chunks)]
        pieces = [chunks[begin:end] for begin, end in zip([0, *cuts], ends, strict=True) if begin < end]
        for answer in ([HEAD, *pieces], [HEAD + pieces[0], *pieces[1:]]):
            recorder = await received(answer)
            assert (recorder.body, recorder.error, recorder.done.is_set()) == (BODY, None, True)


async def test_a_chunk_alone_needs_no_parser() -> None:
    connection = Connection(UpstreamClient(Address.parse("http://127.0.0.1:1")))
    assert connection.only_chunk(CHUNKS[0]) is None  # no answer has begun
    connection.connection_made(cast("Any", Transport()))
    recorder = Recorder()
    connection.carry(Call(b"", b"", recorder))
    connection.data_received(HEAD)
    assert connection.only_chunk(CHUNKS[0]) is None
    connection.data_received(CHUNKS[0])
    assert connection.only_chunk(CHUNKS[1]) == b"\r\n"
    connection.data_received(LAST)
    assert recorder.done.is_set()
    connection.carry(Call(b"", b"", Recorder()))
    assert connection.only_chunk(CHUNKS[1]) is None


@pytest.mark.parametrize("wrong", [b"2\r\nabc\r\n", b"\r\nab\r\n", b"g\r\nab\r\n", b"2\nab\r\n", b"-2\r\nab\r\n"])
async def test_what_is_no_chunk_is_for_the_parser(wrong: bytes) -> None:
    recorder = await received([HEAD, CHUNKS[0], wrong])
    assert recorder.body[:3] == b"ab\n"
    assert recorder.error is not None
    assert recorder.error.kind == "garbage"
