"""The HTTP server: what it bounds, what it ignores, and the order of answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
import pytest_asyncio

from gateway.http import server as server_module
from gateway.http.connection import ServerConnection
from gateway.http.reply import HttpReply
from gateway.http.request_head import HeadLimits
from gateway.http.server import HttpServer, ServerLimits
from tests.support.waiting import TIMEOUT_S, eventually, stays

LIMITS = ServerLimits(HeadLimits(target_bytes=100, headers_bytes=1000, headers=10), body_bytes=1000)


class Echo:
    """Answers each request with its method, path and body."""

    def __init__(self) -> None:
        self.handled: list[HttpReply] = []

    def admit(self, reply: HttpReply) -> None:
        pass

    def handle(self, reply: HttpReply, body: bytes) -> None:
        self.handled.append(reply)
        reply.whole(200, b"", b"%b %b %b" % (reply.request.method.encode(), reply.request.target, body))

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        reply.whole(status, b"", reason.encode())


class Served:
    """A running server."""

    def __init__(self, service: Echo, http: HttpServer, port: int) -> None:
        self.service = service
        self.http = http
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, which ends with the server at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        self.writers.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def serving(service: Echo, limits: ServerLimits) -> AsyncIterator[Served]:
    http = HttpServer(service, limits)
    server = await asyncio.get_running_loop().create_server(
        lambda: cast("asyncio.Protocol", ServerConnection(http)), "127.0.0.1", 0
    )
    served = Served(service, http, server.sockets[0].getsockname()[1])
    yield served
    for writer in served.writers:
        writer.transport.abort()
    server.close()
    for connection in list(http.connections):
        connection.abort()
    await server.wait_closed()


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(Echo(), LIMITS) as started:
        yield started


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_many_pipelined_requests_are_answered_in_order(served: Served) -> None:
    reader, writer = await served.connect()
    for number in range(300):
        last = b"connection: close\r\n" if number == 299 else b""
        writer.write(b"POST /%d HTTP/1.1\r\nhost: h\r\n%bcontent-length: 1\r\n\r\nx" % (number, last))
    async with asyncio.timeout(TIMEOUT_S):
        received = await reader.read()
    assert re.findall(rb"POST /(\d+) x", received) == [b"%d" % number for number in range(300)]


class Streaming(Echo):
    """Answers with a stream that the test writes, and notes what becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.gone = False

    def handle(self, reply: HttpReply, body: bytes) -> None:
        self.handled.append(reply)
        reply.source = self
        reply.head(200, b"")

    def client_gone(self) -> None:
        self.gone = True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


@pytest.fixture
def _often_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("_often_swept")
async def test_a_client_that_stalls_its_body_is_refused() -> None:
    async with serving(Echo(), ServerLimits(stall_s=0.3)) as served:
        reader, writer = await served.connect()
        writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nx")
        async with asyncio.timeout(TIMEOUT_S):
            assert status(await reader.readline()) == 408


class Failing(Echo):
    """Fails to refuse the first request."""

    refused = 0

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        self.refused += 1
        if self.refused == 1:
            raise RuntimeError
        super().refuse(reply, status, reason)


@pytest.mark.usefixtures("_often_swept")
async def test_a_service_that_fails_to_refuse_one_client_still_refuses_the_others() -> None:
    async with serving(Failing(), ServerLimits(head_s=0.2)) as served:
        answers = []
        for _ in range(2):
            reader, writer = await served.connect()
            writer.write(b"GET /a HTTP/1.1\r\n")
            async with asyncio.timeout(TIMEOUT_S):
                answers.append(await reader.read())
        assert answers[0] == b""
        assert status(answers[1]) == 408


async def begun(served: Served, header: bytes = b"", limit: int = 2**16) -> asyncio.StreamReader:
    """Send a request on a connection of its own, and wait until the service handles it."""
    reader, writer = await served.connect(limit)
    writer.write(b"GET /a HTTP/1.1\r\nhost: h\r\n%b\r\n" % header)
    await eventually(lambda: served.service.handled)
    return reader


@pytest.mark.parametrize("ending", ["aborted", "shed", "not received"])
async def test_an_answer_that_breaks_off_does_not_look_complete_in_http_1_0(ending: str) -> None:
    service = Streaming()
    async with serving(service, LIMITS) as served:
        reader, writer = await served.connect()
        writer.write(b"GET /a HTTP/1.0\r\n\r\n")
        await eventually(lambda: service.handled)
        service.handled[0].data(b"half")
        (connection,) = cast("set[ServerConnection]", served.http.connections)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await reader.readuntil(b"half")).startswith(b"HTTP/1.1 200")
            if ending == "aborted":
                service.handled[0].abort()
            elif ending == "shed":
                connection.shed()
            else:
                connection._transport.set_write_buffer_limits(high=1 << 30)  # the rest makes no client slow
                service.handled[0].data(b"x" * 20_000_000)
                service.handled[0].end()
                connection.check(time.monotonic() + 1000.0)
            with pytest.raises(ConnectionResetError):
                await reader.read()


class Broken(Streaming):
    """Fails to handle the second request, or to refuse one."""

    def handle(self, reply: HttpReply, body: bytes) -> None:
        super().handle(reply, body)
        if len(self.handled) == 2:
            raise RuntimeError

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        raise RuntimeError


@pytest.mark.parametrize("head", [b"GET /b HTTP/1.1\r\nhost: h\r\n\r\n", b"no request\r\n\r\n"])
async def test_a_connection_whose_waiting_request_cannot_be_handled_is_closed(head: bytes) -> None:
    service = Broken()
    async with serving(service, LIMITS) as served:
        reader = await begun(served)
        served.writers[0].write(head)
        open_ones: Any = served.http.connections  # whose type is what the server knows of them
        await eventually(lambda: all(each._reader.waiting_bytes() for each in open_ones))
        service.handled[0].end()
        async with asyncio.timeout(TIMEOUT_S):
            assert (await reader.read()).endswith(b"0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.usefixtures("_often_swept")
async def test_a_client_that_does_not_receive_its_answer_is_disconnected() -> None:
    service = Streaming()
    async with serving(service, ServerLimits(stall_s=0.3)) as served:
        reader = await begun(served, limit=1000)
        while not service.paused:
            service.handled[0].data(b"x" * 100_000)
            await asyncio.sleep(0)
        await eventually(lambda: service.gone)
        assert not served.http.connections
        reader.feed_eof()


@pytest.mark.parametrize("is_last", [False, True])
async def test_the_time_of_a_slow_client_begins_again_with_what_it_receives(is_last: bool) -> None:
    service = Streaming()
    async with serving(service, ServerLimits(stall_s=60.0)) as served:
        reader = await begun(served, b"connection: %b\r\n" % (b"close" if is_last else b"te"))
        service.handled[0].data(b"x" * 20_000_000)
        if is_last:
            service.handled[0].end()
        (connection,) = cast("set[ServerConnection]", served.http.connections)
        transport, now_s = connection._transport, time.monotonic()
        for _ in range(5):
            unsent_bytes, now_s = transport.get_write_buffer_size(), now_s + 50.0
            while transport.get_write_buffer_size() > unsent_bytes - 100_000:
                assert await reader.read(1 << 16)
            connection.check(now_s)
        assert served.http.connections
        connection.check(now_s + 61.0)
        await eventually(lambda: not served.http.connections)
        reader.feed_eof()


async def test_a_connection_whose_answer_is_still_being_received_is_not_idle() -> None:
    service = Streaming()
    async with serving(service, ServerLimits(connections=2)) as served:
        receiving = await begun(served)
        service.handled[0].data(b"x" * 20_000_000)
        service.handled[0].end()
        (connection,) = cast("set[ServerConnection]", served.http.connections)
        (idle, _), _ = [await served.connect() for _ in range(2)]
        await eventually(lambda: has_ended(idle) or connection.is_closing)
        assert not connection.is_closing
        receiving.feed_eof()


async def test_the_connection_that_was_idle_for_longest_makes_room() -> None:
    async with serving(Echo(), ServerLimits(connections=50)) as served:
        connections = [await served.connect() for _ in range(50)]
        await eventually(lambda: len(served.http.connections) == 50)
        for reader, writer in reversed(connections):
            writer.write(b"GET /a HTTP/1.1\r\nhost: h\r\n\r\n")
            assert status(await reader.readline()) == 200
        more = [await served.connect() for _ in range(20)]
        for reader, writer in more:
            writer.write(b"GET /b HTTP/1.1\r\nhost: h\r\n\r\n")
            assert status(await reader.readline()) == 200
        await eventually(lambda: sum(reader.at_eof() or has_ended(reader) for reader, _ in connections) == 20)
        assert [has_ended(reader) for reader, _ in connections] == [False] * 30 + [True] * 20
        assert len(served.http.connections) == 50


async def test_incomplete_heads_keep_nobody_out() -> None:
    async with serving(Echo(), ServerLimits(connections=20)) as served:
        slow = [await served.connect() for _ in range(20)]
        for _, writer in slow:
            writer.write(b"GET /a HTTP/1.1\r\nhost: h\r\nx-")
        await eventually(lambda: all(connection.held_bytes for connection in served.http.connections))
        for _ in range(5):
            reader, writer = await served.connect()
            writer.write(b"GET /b HTTP/1.1\r\nhost: h\r\n\r\n")
            assert status(await reader.readline()) == 200
            writer.transport.abort()
        assert len(served.http.connections) <= 20


def has_ended(reader: asyncio.StreamReader) -> bool:
    """Return whether the server has closed the connection, whatever was not read yet."""
    return reader._eof or reader.exception() is not None  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("_often_swept")
async def test_far_too_many_connections_are_closed_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    service = Streaming()
    async with serving(service, ServerLimits(connections=1)) as served:
        connections = [await served.connect()]
        connections[0][1].write(b"GET /a HTTP/1.1\r\nhost: h\r\n\r\n")
        await eventually(lambda: service.handled)
        connections += [await served.connect() for _ in range(200)]
        await eventually(lambda: all(has_ended(reader) for reader, _ in connections[1:]))
        answered = [reader for reader, _ in connections[1:] if reader._buffer]  # type: ignore[attr-defined]
        assert 0 < len(answered) <= 200
        await eventually(lambda: len(served.http.connections) == 1)
        assert not service.gone
    assert len(caplog.records) == 1


async def test_a_request_that_is_not_complete_does_not_count_when_it_has_ended() -> None:
    async with serving(Echo(), ServerLimits(body_bytes=1000, unfinished_bytes=10_000)) as served:
        connections = [await served.connect() for _ in range(9)]
        for _, writer in connections:
            writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n" + b"x" * 900)
        await eventually(lambda: served.http._held_bytes == 8100)
        connections[0][1].transport.abort()
        connections[1][1].write(b"x" * 100)
        connections[2][1].write(b"x" * 50)
        await eventually(lambda: served.http._held_bytes == 6350)
        for _, writer in connections:
            writer.transport.abort()
        await eventually(lambda: served.http._held_bytes == 0)
        assert len(served.service.handled) == 1


async def test_many_small_unfinished_requests_are_refused_from_the_largest_on() -> None:
    limits = ServerLimits(unfinished_bytes=100_000)
    async with serving(Echo(), limits) as served:
        connections = [await served.connect() for _ in range(40)]
        for number, (_, writer) in enumerate(connections):
            writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 9999\r\n\r\n" + b"x" * (1000 + 100 * number))
            await writer.drain()
        await eventually(lambda: any(has_ended(reader) or reader._buffer for reader, _ in connections))  # type: ignore[attr-defined]
        await eventually(lambda: served.http._held_bytes <= limits.unfinished_bytes)
        refused = [number for number, (reader, _) in enumerate(connections) if reader._buffer]  # type: ignore[attr-defined]
        assert refused
        assert min(refused) > 20


@pytest.mark.parametrize("sent", [b"", b"GET /late HTT"])
async def test_a_request_on_its_way_is_answered_by_a_server_that_stops(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.connection._BEGIN_S", TIMEOUT_S)
    async with serving(Echo(), LIMITS) as served:
        reader, writer = await served.connect()
        writer.write(sent)
        open_ones: Any = served.http.connections  # whose type is what the server knows of them
        await eventually(lambda: any(each._reader.waiting_bytes() == len(sent) for each in open_ones))
        served.http.shutdown()
        writer.write(b"GET /late HTTP/1.1\r\nhost: a\r\n\r\n"[len(sent) :])
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        assert answer.endswith(b"GET /late ")


async def test_other_limits_apply_to_the_next_request_of_an_open_connection() -> None:
    async with serving(Echo(), LIMITS) as served:
        reader, writer = await served.connect()
        for most_bytes, size, expected in ((1000, 1000, 200), (2000, 1500, 200), (100, 500, 413)):
            served.http.change(replace(LIMITS, body_bytes=most_bytes))
            writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size))
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                assert status(head) == expected
                if expected == 200:
                    await reader.readexactly(len(b"POST /a ") + size)


async def test_a_request_in_flight_is_the_last_of_its_connection_at_a_server_that_stops() -> None:
    service = Streaming()
    async with serving(service, LIMITS) as served:
        reader = await begun(served)
        served.http.shutdown()
        service.handled[0].end()
        async with asyncio.timeout(TIMEOUT_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 200")


async def test_a_server_that_stops_waits_for_no_silent_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.connection._BEGIN_S", 0.0)
    async with serving(Echo(), LIMITS) as served:
        reader, _ = await served.connect()
        await eventually(lambda: served.http.connections)
        served.http.shutdown()
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""


@pytest.mark.usefixtures("_often_swept")
async def test_a_client_that_receives_slowly_stays() -> None:
    service = Streaming()
    async with serving(service, ServerLimits(stall_s=1.0)) as served:
        reader = await begun(served)
        for _ in range(3):
            while not service.paused:
                service.handled[0].data(b"x" * 100_000)
                await asyncio.sleep(0)
            while service.paused:
                await reader.read(1 << 16)
        await stays(lambda: not service.gone, 0.2)
