"""The HTTP server: what it bounds, what it ignores, and the order of answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from backends.http.request_head import HeadLimits
from backends.http.server import HttpReply, HttpServer, ServerLimits
from tests.support.waiting import TIMEOUT_S

LIMITS = ServerLimits(HeadLimits(target_bytes=100, headers_bytes=1000, headers=10), body_bytes=1000)


class Echo:
    """Answers each request with its method, path and body; refuses those to /refused before their body."""

    def __init__(self) -> None:
        self.handled: list[HttpReply] = []

    def admit(self, reply: HttpReply) -> None:
        if reply.request.path == "/refused":
            self.refuse(reply, 401, "no key")

    def handle(self, reply: HttpReply, body: bytes) -> None:
        self.handled.append(reply)
        reply.whole(200, b"", b"%b %b %b" % (reply.request.method.encode(), reply.request.path.encode(), body))

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        reply.whole(status, b"", reason.encode())


class Served:
    """A running server."""

    def __init__(self, service: Echo, http: HttpServer, port: int) -> None:
        self.service = service
        self.http = http
        self.port = port

    async def send(self, *pieces: bytes) -> bytes:
        """Send pieces one after another, end the sending side, and return all that the server sends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(TIMEOUT_S):
                if writer.can_write_eof():
                    writer.write_eof()
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    service = Echo()
    http = HttpServer(service, LIMITS)
    server = await asyncio.get_running_loop().create_server(
        lambda: cast("asyncio.Protocol", http.connect()), "127.0.0.1", 0
    )
    yield Served(service, http, server.sockets[0].getsockname()[1])
    server.close()
    for connection in list(http.connections):
        connection.abort()
    await server.wait_closed()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def bodies(answers: bytes) -> list[bytes]:
    """Return the bodies of answers that have a content length."""
    found = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        found.append(rest[:length])
        answers = rest[length:]
    return found


CLOSE = b"connection: close\r\n"


async def answers_of(served: Served, *pieces: bytes, count: int) -> list[bytes]:
    """Send pieces on a connection that stays open, and return the bodies of so many answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        received = b""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                data = await reader.read(1 << 16)
                assert data, f"closed after {received[-500:]!r}"
                received += data
                if received.count(b"HTTP/1.1 ") >= count and len(bodies(received)) >= count:
                    return bodies(received)
    finally:
        writer.transport.abort()


async def status_of_a_flood(served: Served, begins: bytes, piece: bytes) -> int:
    """Send a request that never ends until it is answered, and return the status of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(begins)
    answer = asyncio.ensure_future(reader.readline())
    sent = 0
    async with asyncio.timeout(TIMEOUT_S):
        while not answer.done() and sent < 1 << 24:
            writer.write(piece)
            sent += len(piece)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        line = await answer
    writer.transport.abort()
    return status(line)


async def test_a_long_target_gets_414(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /" + b"x" * 200 + b" HTTP/1.1\r\nhost: h\r\n\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        assert status(await reader.readline()) == 414
    writer.close()


@pytest.mark.parametrize(
    "head",
    [b"x: 1\r\n" * 11, b"x: " + b"y" * 1200 + b"\r\n", b"".join(b"x%d: %b\r\n" % (n, b"y" * 150) for n in range(9))],
)
async def test_large_heads_get_431(served: Served, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET / HTTP/1.1\r\n" + head + b"\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        assert status(await reader.readline()) == 431
    writer.close()
    assert served.service.handled == []


async def test_a_head_without_an_end_is_refused_before_it_is_held(served: Served) -> None:
    assert await status_of_a_flood(served, b"GET / HTTP/1.1\r\nx: ", b"y" * 65_536) == 431


async def test_bodies_above_the_limit_get_413_before_they_are_read(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 1001\r\n\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        assert status(await reader.readline()) == 413
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001)
    async with asyncio.timeout(TIMEOUT_S):
        assert status(await reader.readline()) == 413
    writer.close()
    assert served.service.handled == []


async def test_framing_without_a_body_is_bounded(served: Served) -> None:
    head = b"POST /a HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    assert await status_of_a_flood(served, head + b"1;", b"e" * 65_536) == 400
    assert await status_of_a_flood(served, head, b"1;%b\r\nx\r\n" % (b"e" * 200)) == 400
    assert await status_of_a_flood(served, head + b"0\r\n", b"x: 1\r\n" * 1000) == 431
    assert await status_of_a_flood(served, head, b"%040x\r\nx\r\n" % 1) == 400


async def test_an_upgrade_is_ignored_and_the_body_is_read(served: Served) -> None:
    request = (
        b"POST /a HTTP/1.1\r\nhost: h\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAA\r\ncontent-length: 4\r\n\r\nbody"
    )
    following = b"GET /b HTTP/1.1\r\nhost: h\r\n\r\n"
    expected = [b"POST /a body", b"GET /b "]
    assert await answers_of(served, request + following, count=2) == expected
    assert await answers_of(served, request[:-4], b"body", following, count=2) == expected
    assert await answers_of(served, request.replace(b"4\r\n\r\nbody", b"0\r\n\r\n") + following, count=2) == [
        b"POST /a ",
        b"GET /b ",
    ]


async def test_trailers_are_not_headers(served: Served) -> None:
    request = (
        b"POST /a HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\nab\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    )
    assert await answers_of(served, request, count=1) == [b"POST /a ab"]
    assert [name for name, _ in served.service.handled[0].request.headers] == [b"host", b"transfer-encoding"]


async def test_what_is_not_http_is_refused_after_the_answers_before_it(served: Served) -> None:
    answers = await served.send(b"GET /a HTTP/1.1\r\nhost: h\r\n\r\nNOT HTTP AT ALL\r\n\r\n")
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert b"GET /a " in answers
    assert b"HTTP/1.1 400 " in answers


async def test_a_refused_request_whose_body_has_arrived_keeps_the_connection(served: Served) -> None:
    refused = b"POST /refused HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nbody"
    assert await answers_of(served, refused + b"GET /b HTTP/1.1\r\nhost: h\r\n\r\n", count=2) == [b"no key", b"GET /b "]


async def test_a_refused_head_is_refused_again(served: Served) -> None:
    refused = b"POST /refused HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nbody"
    assert await answers_of(served, *[refused] * 5, count=5) == [b"no key"] * 5
    assert served.service.handled == []


async def test_a_request_refused_before_its_body_closes_the_connection(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /refused HTTP/1.1\r\nhost: h\r\ncontent-length: 400\r\n\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        answer = await reader.readuntil(b"\r\n\r\n")
    assert status(answer) == 401
    assert CLOSE in answer
    writer.close()


async def test_many_pipelined_requests_are_answered_in_order(served: Served) -> None:
    requests = b"".join(b"POST /%d HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n\r\nx" % number for number in range(300))
    assert await answers_of(served, requests, count=300) == [b"POST /%d x" % number for number in range(300)]


async def test_known_heads_in_one_read_do_not_nest(served: Served) -> None:
    one = b"POST /same HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n\r\nx"
    assert await answers_of(served, one, one, one * 5000, count=5002) == [b"POST /same x"] * 5002
