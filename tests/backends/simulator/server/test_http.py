"""The bytes that the HTTP server sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.simulator.server.http import Exchange, Listener
from tests.support.waiting import eventually


class Server:
    """A listener whose handler answers according to the path, and records pending and abandoned requests."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.pending: list[Exchange] = []
        self.listener = Listener(self.handle)
        self.port = 0

    def handle(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if path == "/later":
            self.pending.append(exchange)
            exchange.on_gone = lambda: self.gone.append(path)
        elif path == "/stream":
            exchange.start()
            for piece in (b"one", b"two"):
                exchange.write(piece)
            exchange.end(b"three")
        else:
            exchange.respond(200, exchange.request.body or path.encode(), "text/plain")

    async def send(self, data: bytes, *, until: bytes = b"") -> bytes:
        """Send bytes and return the reply up to `until`, or until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.readuntil(until) if until else reader.read(), 10)
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    each = Server()
    each.port = await each.listener.start("127.0.0.1", 0)
    yield each
    await each.listener.stop()


async def test_a_complete_answer(server: Server) -> None:
    answer = await server.send(b"GET /a?b=c HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    lines = head.split(b"\r\n")
    assert {b"content-length: 2", b"content-type: text/plain", b"connection: close"} <= set(lines)
    assert body == b"/a"


async def test_a_stream_is_chunked(server: Server) -> None:
    answer = await server.send(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b"transfer-encoding: chunked" in answer
    assert answer.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")


async def test_a_stream_for_http_1_0_ends_with_the_connection(server: Server) -> None:
    answer = await server.send(b"GET /stream HTTP/1.0\r\n\r\n")
    assert b"chunked" not in answer
    assert answer.endswith(b"\r\n\r\nonetwothree")


async def test_requests_on_one_connection_are_answered_in_order(server: Server) -> None:
    sent = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % index for index in range(3))
    answer = await server.send(sent, until=b"\r\n\r\n/2")
    bodies = [part[:2] for part in answer.split(b"\r\n\r\n")[1:]]
    assert bodies == [b"/0", b"/1", b"/2"]


async def test_a_request_waits_for_the_one_before_it(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /later HTTP/1.1\r\nhost: x\r\n\r\nGET /next HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(10):
        await eventually(lambda: server.pending)
        server.pending[0].respond(200, b"first")
        answer = await reader.readuntil(b"/next")
    assert answer.index(b"first") < answer.index(b"/next")
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_disconnects_is_noticed(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /later HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(10):
        await eventually(lambda: server.pending)
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: server.gone)
    exchange = server.pending[0]
    assert exchange.gone
    exchange.respond(200, b"unread")


async def test_bodies_can_arrive_in_pieces_and_in_chunks(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for piece in (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-le", b"ngth: 10\r\n\r\n01234", b"56789"):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(reader.readuntil(b"0123456789"), 10)).startswith(b"HTTP/1.1 200")
    writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"abcde"), 10)).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_expects_100_continue_gets_it(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert (await asyncio.wait_for(reader.readuntil(b"abc"), 10)).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"garbage\r\n\r\n", b"400"), (b"\x16\x03\x01\x02\x00", b"400"), (b"GET / HTTP/9.9\r\n\r\n", b"505")],
)
async def test_invalid_http_is_refused(server: Server, sent: bytes, status: bytes) -> None:
    assert (await server.send(sent)).startswith(b"HTTP/1.1 " + status)


async def test_a_head_request_has_no_body(server: Server) -> None:
    answer = await server.send(b"HEAD /abc HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b"content-length: 4" in answer
    assert answer.endswith(b"\r\n\r\n")
