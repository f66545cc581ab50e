"""The HTTP client of the relay, against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from backends.http.client import Address, AnswerHead, HeaderList, UpstreamClient, UpstreamError, request_head
from backends.http.head_pattern import pattern_of

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REQUEST = request_head(b"GET", b"/x", [(b"host", b"h")])


class Recorder:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.body = b""
        self.error: UpstreamError | None = None
        self.done = asyncio.Event()

    def on_head(self, status: int, headers: HeaderList) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.done.set()

    def on_error(self, error: UpstreamError) -> None:
        self.error = error
        self.done.set()


@contextlib.asynccontextmanager
async def serving(handler: Handler, path: Path | None = None) -> AsyncIterator[UpstreamClient]:
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)

    if path is not None:
        server = await asyncio.start_unix_server(handle, path)
        address = Address.parse(f"unix:{path}")
    else:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        address = Address.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = UpstreamClient(address, connect_timeout_s=1.0)
    try:
        yield client
    finally:
        client.close()
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def ask(client: UpstreamClient, *, head_only: bool = False) -> Recorder:
    recorder = Recorder()
    client.send(REQUEST, b"", recorder, head_only=head_only)
    async with asyncio.timeout(5):
        await recorder.done.wait()
    return recorder


def answering(*answers: bytes, close: bool = False) -> Handler:
    """Answer each request of a connection with the next of `answers`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        if close:
            writer.close()
        else:
            await reader.read()

    return handler


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: 1\r\n\r\nok"


async def test_an_answer_of_known_length() -> None:
    async with serving(answering(OK)) as client:
        got = await ask(client)
        assert (got.status, got.body, got.error) == (200, b"ok", None)
        assert (b"x-a", b"1") in got.headers


async def test_a_chunked_answer_and_reuse_of_its_connection() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answering(chunked, OK, chunked)(reader, writer)

    async with serving(handler) as client:
        assert [(await ask(client)).body for _ in range(3)] == [b"abc", b"ok", b"abc"]
        assert connections == 1


async def test_an_answer_that_lasts_until_the_connection_closes() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)) as client:
        got = await ask(client)
        assert (got.body, got.error) == (b"all of it", None)


async def test_interim_answers_are_not_told() -> None:
    async with serving(
        answering(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)
    ) as c:
        got = await ask(c)
        assert (got.status, got.body) == (200, b"ok")
        assert not [name for name, _ in got.headers if name == b"link"]


async def test_an_answer_to_head_has_no_body_whatever_it_says() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n")) as client:
        got = await ask(client, head_only=True)
        assert (got.status, got.body, got.error) == (200, b"", None)


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(status: int) -> None:
    async with serving(answering(b"HTTP/1.1 %d X\r\n\r\n" % status, OK)) as client:
        assert (await ask(client)).status == status
        assert (await ask(client)).status == 200


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"nonsense\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "broken"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "broken"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "garbage"),
        (b"HTTP/1.1 20", "broken"),
        (b"", "broken"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "garbage"),
    ],
)
async def test_faults_are_told_apart(answer: bytes, kind: str) -> None:
    async with serving(answering(answer, close=True)) as client:
        got = await ask(client)
        assert got.error is not None
        assert got.error.kind == kind


async def test_nobody_listens() -> None:
    async with serving(answering(OK)) as client:
        address = client.address
    got = await ask(UpstreamClient(address, connect_timeout_s=1.0))
    assert got.error is not None
    assert got.error.kind == "connect"


async def test_a_connection_that_does_not_come_about_in_time() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = []
        for _ in range(4):  # a backlog that is full drops what comes more
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
            fillers.append(filler)
        got = await ask(UpstreamClient(Address.parse(f"http://127.0.0.1:{port}"), connect_timeout_s=0.2))
        for filler in fillers:
            filler.close()
    assert got.error is not None
    assert (got.error.kind, "0.2 s" in str(got.error)) == ("connect", True)


async def test_the_keep_alive_race_is_won_on_a_fresh_connection() -> None:
    async with serving(answering(OK, close=True)) as client:
        for _ in range(20):
            got = await ask(client)
            assert (got.status, got.error) == (200, None)


async def test_what_an_idle_connection_says_closes_it() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 408 Too Slow\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with serving(handler) as client:
        assert (await ask(client)).status == 200
        await asyncio.sleep(0.1)
        assert (await ask(client)).status == 200


async def test_cancel_closes_the_connection_and_tells_nothing_more() -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await reader.read()
        closed.set()

    async with serving(handler) as client:
        recorder = Recorder()
        call = client.send(REQUEST, b"", recorder)
        async with asyncio.timeout(5):
            while not recorder.body:
                await asyncio.sleep(0.005)
            call.cancel()
            await closed.wait()
        assert not recorder.done.is_set()


async def test_a_paused_call_lets_the_backend_wait() -> None:
    size = 8_000_000

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(bytes(size))
        await reader.read()

    async with serving(handler) as client:
        recorder = Recorder()
        call = client.send(REQUEST, b"", recorder)
        call.pause()
        await asyncio.sleep(0.2)
        assert len(recorder.body) < 1_000_000
        call.resume()
        async with asyncio.timeout(5):
            await recorder.done.wait()
        assert len(recorder.body) == size


async def test_unix_sockets(tmp_path: Path) -> None:
    async with serving(answering(OK), tmp_path / "s") as client:
        assert (await ask(client)).body == b"ok"


def test_addresses() -> None:
    assert Address.parse("http://h").port == 80
    assert Address.parse("https://h").port == 443
    assert Address.parse("http://[::1]:8").host == "::1"
    assert Address.parse("http://[::1]:8").authority == b"[::1]:8"
    assert Address.parse("unix:/a/b").path == "/a/b"
    for wrong in ("h:80", "ftp://h", "unix:relative", "http://"):
        with pytest.raises(ValueError, match=r"expected|absolute"):
            Address.parse(wrong)


class Whole(Recorder):
    """One that takes answers in one piece."""

    came_whole = 0

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        self.came_whole += 1
        self.on_head(head.status, head.headers)
        self.on_data(body)
        self.on_end()


def of(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\nX-A: 1\r\n\r\n%b" % (extra, len(body), body)


async def ask_for_whole(client: UpstreamClient) -> Whole:
    recorder = Whole()
    client.send(REQUEST, b"", recorder, whole=recorder)
    async with asyncio.timeout(5):
        await recorder.done.wait()
    return recorder


async def test_answers_like_the_one_before_come_whole() -> None:
    bodies = [b"first", b"second", b"", b"x" * 50_000, b"fifth"]
    async with serving(answering(*map(of, bodies))) as client:
        got = [await ask_for_whole(client) for _ in bodies]
        assert [one.body for one in got] == bodies
        assert [one.came_whole for one in got] == [0, 1, 1, 1, 1]
        assert {one.status for one in got} == {200}


async def test_answers_unlike_the_one_before_are_parsed() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    failed = b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\nx-a: 1\r\n\r\nno"
    last = of(b"last", b"connection: close\r\n")
    answers = [of(b"a"), chunked, of(b"b"), failed, of(b"c", b"date: now\r\n"), of(b"d"), last]
    async with serving(answering(*answers, close=True)) as client:
        got = [await ask_for_whole(client) for _ in answers]
        assert [one.body for one in got] == [b"a", b"ab", b"b", b"no", b"c", b"d", b"last"]
        assert [one.status for one in got] == [200, 200, 200, 500, 200, 200, 200]
        assert [one.came_whole for one in got] == [0, 0, 1, 0, 0, 0, 0]


async def test_a_known_answer_in_pieces_is_put_together() -> None:
    whole = of(b"0123456789")

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for cut in (None, 5, len(whole) - 12, len(whole) - 9, len(whole) - 1):
            await reader.readuntil(b"\r\n\r\n")
            for part in (whole[:cut], whole[cut:] if cut else b""):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole[:-3])
        writer.close()

    async with serving(handler) as client:
        got = [await ask_for_whole(client) for _ in range(6)]
        assert [one.body for one in got[:5]] == [b"0123456789"] * 5
        assert not any(one.came_whole for one in got)
        assert got[5].error is not None
        assert got[5].error.kind == "broken"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-content-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1234567890\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * 5000 + b"\r\ncontent-length: 2\r\n\r\n",
    ],
)
def test_heads_that_have_no_pattern(head: bytes) -> None:
    assert pattern_of(head + b"ok") is None


@pytest.mark.parametrize("length", [b"", b"x", b"1x", b"-1", b" 12", b"1234567890123"])
def test_a_pattern_takes_digits_alone(length: bytes) -> None:
    pattern = pattern_of(b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\nx: y\r\n\r\n")
    assert pattern is not None
    assert pattern.body_begins(b"HTTP/1.1 200 OK\r\ncontent-length: %b\r\nx: y\r\n\r\n" % length) == -1
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 345\r\nx: y\r\n\r\n"
    assert pattern.body_begins(head + b"abc") == len(head)
    assert pattern.length == 345
    assert pattern.body_begins(head[:-1]) == -1
