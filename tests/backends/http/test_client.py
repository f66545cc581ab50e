"""The HTTP client of the relay, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.address import Address
from backends.http.client import Call, UpstreamClient, UpstreamConnection
from backends.http.receiver import AnswerHead, HeaderList, UpstreamError, WholeReceiver
from backends.http.wire import pattern_of, request_head
from tests.support.waiting import eventually, stays

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REQUEST = request_head(b"GET", b"/x", [(b"host", b"h")])


class Recorder(WholeReceiver):
    """A receiver that stores an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.body = b""
        self.error: UpstreamError | None = None
        self.done = asyncio.Event()
        self.whole_answers = 0

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        self.whole_answers += 1
        self.on_head(head.status, head.headers)
        self.on_data(body)
        self.on_end()

    def on_head(self, status: int, headers: HeaderList) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.done.set()

    def on_error(self, error: UpstreamError) -> None:
        self.error = error
        self.done.set()

    async def ended(self) -> None:
        async with asyncio.timeout(5):
            await self.done.wait()

    @property
    def problem(self) -> str:
        assert self.error is not None
        return self.error.kind


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


async def ask(client: UpstreamClient, *, once: bool = False) -> Recorder:
    recorder = Recorder()
    client.send(Call(REQUEST, b"", recorder, once=once))
    await recorder.ended()
    return recorder


def answering(*answers: bytes, close: bool = False) -> Handler:
    """Return a handler that answers each request of a connection with the next of `answers`."""

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


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"nonsense\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "broken"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "broken"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "garbage"),
        (b"HTTP/1.1 20", "broken"),
        (b"", "broken"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 20_000_000, "garbage"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000, "garbage"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;" + b"x" * 20_000_000, "garbage"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"x: y\r\n" * 3_000_000, "garbage"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "garbage"),
    ],
)
async def test_failures_have_the_right_kind(answer: bytes, kind: str) -> None:
    async with serving(answering(answer, close=True)) as client:
        received = await ask(client)
        assert received.problem == kind
        assert sum(map(len, received.headers)) < 1000, "what is refused is not kept"


async def test_connecting_times_out() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = []
        for _ in range(4):  # a full backlog drops further connections
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
            fillers.append(filler)
        received = await ask(UpstreamClient(Address.parse(f"http://127.0.0.1:{port}"), connect_timeout_s=0.2))
        for filler in fillers:
            filler.close()
    assert (received.problem, "0.2 s" in str(received.error)) == ("connect", True)


async def test_a_request_lost_in_the_keep_alive_race_is_sent_again() -> None:
    async with serving(answering(OK, close=True)) as client:
        for _ in range(20):
            received = await ask(client)
            assert (received.status, received.error) == (200, None)


async def test_no_request_waits_behind_one_that_was_answered_before_it_was_read() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.Event().wait()

    async with serving(handler) as client:
        for _ in range(3):  # the first answer has an unknown head
            recorder = Recorder()
            client.send(Call(REQUEST, b"x" * 32_000_000, recorder, whole=recorder))
            await recorder.ended()
            assert (recorder.status, client._idle) == (200, [])
            client.known.learn(OK, recorder.headers)


async def test_a_request_that_must_not_be_sent_twice_gets_a_new_connection() -> None:
    requests = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        for answer in (OK, b""):  # takes a second request of the same connection, and closes
            await reader.readuntil(b"\r\n\r\n")
            requests += 1
            writer.write(answer)
        writer.close()

    async with serving(handler) as client:
        assert (await ask(client)).status == 200
        assert (await ask(client, once=True)).status == 200
        assert requests == 2
        assert len(client._idle) == 1, "a connection for one request is not kept"


@pytest.mark.parametrize("head_only", [False, True])
@pytest.mark.parametrize("first", ["on_head", "on_data"])
async def test_a_receiver_may_cancel_while_its_answer_is_parsed(
    first: str, head_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Cancelling(Recorder):
        call: Call | None = None

        def cancel_at(self, event: str) -> None:
            if event == first or head_only:
                assert self.call is not None
                self.call.cancel()
                self.done.set()

        def on_head(self, status: int, headers: HeaderList) -> None:
            super().on_head(status, headers)
            self.cancel_at("on_head")

        def on_data(self, data: bytes) -> None:
            super().on_data(data)
            self.cancel_at("on_data")

    async with serving(answering(OK, OK)) as client:
        for _ in range(2):
            recorder = Cancelling()
            recorder.call = client.send(Call(REQUEST, b"", recorder, head_only=head_only))
            await recorder.ended()
            assert recorder.error is None
            assert recorder.body == (b"" if first == "on_head" or head_only else b"ok")
        assert (await ask(client)).status == 200
    assert caplog.records == []


async def test_a_request_is_not_lost_on_a_connection_that_a_balancer_has_dropped_without_a_word() -> None:
    connections: list[bool] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(True)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()  # a later request goes nowhere
        connections[number] = False

    async with serving(handler) as client:
        client._keep_alive_s = 0.05
        assert (await ask(client)).status == 200
        await eventually(lambda: connections == [False])  # without any further request
        assert (await ask(client)).status == 200
        assert len(connections) == 2


async def test_data_on_an_idle_connection_closes_it() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 408 Too Slow\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with serving(handler) as client:
        assert (await ask(client)).status == 200
        await eventually(lambda: not client._idle)
        assert (await ask(client)).status == 200


async def test_cancel_closes_the_connection_without_calling_the_receiver() -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await reader.read()
        closed.set()

    async with serving(handler) as client:
        recorder = Recorder()
        call = client.send(Call(REQUEST, b"", recorder))
        await eventually(lambda: recorder.body)
        call.cancel()
        async with asyncio.timeout(5):
            await closed.wait()
        assert not recorder.done.is_set()


class Paused(asyncio.Transport):
    """A transport that knows whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = self.is_aborted = False

    def write(self, data: object) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        self.is_aborted = True


def carried(recorder: Recorder) -> tuple[UpstreamConnection, Paused, Call]:
    client, transport = UpstreamClient(Address.parse("http://127.0.0.1:1")), Paused()
    connection = UpstreamConnection(client)
    connection.connection_made(transport)
    client.keep(connection)
    return connection, transport, client.send(Call(REQUEST, b"", recorder))


LONG = b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000


async def test_a_paused_call_stops_reading_from_the_backend() -> None:
    _, transport, call = carried(Recorder())
    call.pause()
    assert transport.is_paused
    call.resume()
    assert not transport.is_paused


async def test_a_long_read_is_parsed_in_turns() -> None:
    recorder = Recorder()
    connection, transport, call = carried(recorder)
    connection.data_received(LONG)
    assert transport.is_paused, "nothing more is read while something waits"
    parsed = [len(recorder.body)]
    while not recorder.done.is_set():
        await asyncio.sleep(0)
        parsed.append(len(recorder.body))
        if len(parsed) == 3:
            call.pause()
            await stays(lambda: len(recorder.body) == parsed[-1], 0.05)
            call.resume()
    assert max(after - before for before, after in pairwise([0, *parsed])) <= 1 << 16
    assert (len(recorder.body), recorder.error, transport.is_paused) == (300_000, None, False)
    assert connection.is_usable()


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n\r\n", b""])
async def test_what_waits_for_its_turn_counts_when_the_connection_ends(more: bytes) -> None:
    recorder = Recorder()
    connection, _, _ = carried(recorder)
    connection.data_received(LONG + more)
    connection.connection_lost(None)
    assert (len(recorder.body), recorder.error, recorder.done.is_set()) == (300_000, None, True)
    await asyncio.sleep(0)
    assert not connection.is_usable()


async def test_a_unix_socket_is_connected_to(tmp_path: Path) -> None:
    async with serving(answering(OK), tmp_path / "s") as client:
        assert (await ask(client)).body == b"ok"


def test_addresses_are_parsed() -> None:
    assert Address.parse("http://h").port == 80
    assert Address.parse("https://h").port == 443
    assert Address.parse("http://[::1]:8").host == "::1"
    assert Address.parse("http://[::1]:8").authority == b"[::1]:8"
    assert Address.parse("unix:/a/b").path == "/a/b"
    for wrong in ("h:80", "ftp://h", "unix:relative", "http://"):
        with pytest.raises(ValueError, match=r"expected|absolute"):
            Address.parse(wrong)


def answer_of(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\nX-A: 1\r\n\r\n%b" % (extra, len(body), body)


WITH_ID = b"server: uvicorn\r\nx-request-id: r1\r\n"
"""Header lines of vLLM."""


async def ask_for_whole(client: UpstreamClient) -> Recorder:
    recorder = Recorder()
    client.send(Call(REQUEST, b"", recorder, whole=recorder))
    await recorder.ended()
    return recorder


async def test_answers_with_a_known_head_arrive_in_one_call_and_others_are_parsed() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    failed = b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\nx-a: 1\r\n\r\nno"
    long = b"x" * 50_000
    sent = [  # what is sent, its status and body, and whether it arrives whole
        (answer_of(b"a"), 200, b"a", 0),
        (chunked, 200, b"ab", 0),
        (answer_of(b"b"), 200, b"b", 1),
        (failed, 500, b"no", 0),
        (answer_of(b"c", b"date: now\r\n"), 200, b"c", 0),
        (answer_of(b"d"), 200, b"d", 0),
        (answer_of(b""), 200, b"", 1),
        (answer_of(long), 200, long, 1),
        (answer_of(b"e", WITH_ID), 200, b"e", 0),
        (answer_of(b"other", WITH_ID.replace(b"r1", b"r22")), 200, b"other", 1),
        (answer_of(b"f", WITH_ID.replace(b"uvicorn", b"nginx")), 200, b"f", 0),
        (answer_of(b"last", b"connection: close\r\n"), 200, b"last", 0),
    ]
    async with serving(answering(*(answer for answer, *_ in sent), close=True)) as client:
        for _, *expected in sent:
            received = await ask_for_whole(client)
            assert [received.status, received.body, received.whole_answers] == expected


async def test_an_answer_with_a_known_head_in_pieces_is_parsed() -> None:
    whole = answer_of(b"0123456789")

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
        received = [await ask_for_whole(client) for _ in range(6)]
        assert [answer.body for answer in received[:5]] == [b"0123456789"] * 5
        assert not any(answer.whole_answers for answer in received)
        assert received[5].problem == "broken"


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
def test_a_head_without_exactly_one_length_has_no_pattern(head: bytes) -> None:
    assert pattern_of(head + b"ok") is None


def head_of(data: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return the headers that a strict parser finds in an answer with a body of 2 bytes; None if it refuses it."""
    headers: list[tuple[bytes, bytes]] = []
    bodies: list[bytes] = []

    class Callbacks:
        on_header = staticmethod(lambda name, value: headers.append((name.lower(), value)))
        on_body = staticmethod(bodies.append)

    try:
        httptools.HttpResponseParser(Callbacks()).feed_data(data)
    except httptools.HttpParserError:
        return None
    return headers if bodies == [b"ok"] else None


@given(
    st.lists(
        st.sampled_from(
            [b"r1", b"\r\n", b"\n", b"\r", b"\0", b"\xff", b" ", b"x", b": ", b"transfer-encoding: chunked", b"2"]
        )
    ).map(b"".join),
    st.sampled_from([b"r1", b"uvicorn", b"X-A: 1", b"Length: 2", b"HTTP/1.1"]),
)
def test_a_head_that_matches_is_what_a_parser_reads(value: bytes, place: bytes) -> None:
    known = answer_of(b"ok", WITH_ID)
    pattern = pattern_of(known, id_varies=True)
    assert pattern is not None
    changed = known.replace(place, value, 1)
    if pattern.body_begins(changed) == len(changed) - 2 and pattern.length == 2:
        expected, found = head_of(known), head_of(changed)
        assert expected is not None
        assert found is not None
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(one == other or one[0] == b"x-request-id" for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("request_id", [b"", b"a\nb: c", b"a\x00", b"\xe4", b"x" * 257, b"a\r\nb: c"])
def test_a_request_id_that_is_no_short_text_matches_no_pattern(request_id: bytes) -> None:
    pattern = pattern_of(answer_of(b"ok", WITH_ID), id_varies=True)
    assert pattern is not None
    assert pattern.body_begins(answer_of(b"ok", WITH_ID.replace(b"r1", b"x" * 256))) > 0
    assert pattern.body_begins(answer_of(b"ok", WITH_ID.replace(b"r1", request_id))) == -1


def test_id_varies_only_where_that_is_said() -> None:
    pattern = pattern_of(answer_of(b"ok", WITH_ID))
    assert pattern is not None
    assert pattern.body_begins(answer_of(b"other", WITH_ID)) > 0
    assert pattern.body_begins(answer_of(b"ok", WITH_ID.replace(b"r1", b"r2"))) == -1
