"""HTTP on the wire, from correct, incorrect and hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from gateway.http import server
from tests.gateway.conftest import MODEL, Running, Start
from tests.support.upstream import answer, answering
from tests.support.waiting import TIMEOUT_S

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


def post(body: bytes = BODY, extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST /v1/chat/completions HTTP/%s\r\nhost: h\r\n%scontent-length: %d\r\n\r\n"
    return head % (version, extra, len(body)) + body


class Raw:
    """A bare connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, running: Running) -> AsyncIterator[Raw]:
        raw = cls(*await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2])))
        try:
            yield raw
        finally:
            raw.close()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(5):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines[1:] if line}
            body = b""
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readline()
                await self.reader.readline()
            return int(lines[0].split()[1]), headers, body

    def close(self) -> None:
        self.writer.transport.abort()


async def test_expect_100_continue(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running, Raw.to(running) as raw:
        request = post(extra=b"expect: 100-continue\r\n")
        head = request[: -len(BODY)]
        raw.writer.write(head)
        assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        assert running.upstreams["a"].seen == []
        raw.writer.write(BODY)
        assert (await raw.answer())[0] == 200
        assert running.upstreams["a"].seen[0].header("expect") is None


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_and_connection_close(gateway_of: Start, stream: bool) -> None:
    body = json.dumps({"model": MODEL, "messages": [], "stream": stream}).encode()
    async with gateway_of({"a": "baseline"}) as running:
        async with Raw.to(running) as raw:
            raw.writer.write(post(body, extra=b"connection: close\r\n"))
            status, headers, _ = await raw.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await raw.reader.read() == b""
        async with Raw.to(running) as raw, asyncio.timeout(5):
            raw.writer.write(post(body, version=b"1.0"))
            assert (await raw.reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_refusal_reaches_a_client_that_sends_garbage_after_its_request(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running, Raw.to(running) as raw:
        raw.writer.write(post(b"no JSON") + b"NOT HTTP AT ALL\r\n\r\n")
        status, _, body = await raw.answer()
        assert status == 400
        assert b"not a JSON object" in body, "expected the answer to the request, not to the garbage"


async def test_a_head_that_is_not_the_known_one_of_its_connection_is_parsed(gateway_of: Start) -> None:
    key = b"authorization: Bearer sk-right\r\n"
    keys = [{"name": "k", "key": "sk-right", "may_override": True}]
    async with gateway_of({"a": "baseline", "b": "ngram"}, keys=keys) as running, Raw.to(running) as raw:
        for _ in range(3):
            raw.writer.write(post(BODY, key))
            assert (await raw.answer())[0] == 200
        for backend in ("a", "b", "a", "a"):
            raw.writer.write(post(BODY, key + b"x-gateway-backend: %b\r\n" % backend.encode()))
            assert (await raw.answer())[1]["x-gateway-backend"] == backend
        known, wrong = post(BODY, key), post(BODY, key.replace(b"right", b"wrong"))
        for sent in (wrong, known, b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n", known):
            raw.writer.write(sent)
            assert (await raw.answer())[0] == (401 if sent is wrong else 200)


@pytest.mark.slow
async def test_an_idle_connection_is_closed(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}) as running, Raw.to(running) as raw, asyncio.timeout(5):
        raw.writer.write(post())
        assert (await raw.answer())[0] == 200
        assert await raw.reader.read() == b""


# Requests that two parties could read differently are refused, also behind a known head


PATH = b"/v1/chat/completions"
NEXT = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: h\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def request(lines: bytes, body: bytes = b"", first: bytes = b"POST " + PATH + b" HTTP/1.1") -> bytes:
    return b"%b\r\nhost: h\r\n%b\r\n%b" % (first, lines, body)


def length(value: bytes) -> bytes:
    return b"content-length: " + value + b"\r\n"


REFUSED: dict[str, tuple[bytes, int]] = {
    "length and chunks": (request(length(b"%d" % len(CHUNKS)) + CHUNKED, CHUNKS), 400),
    "an unknown method": (request(b"", first=b"BREW / HTTP/1.1"), 501),
    "a huge chunk": (request(CHUNKED, b"ffffffffffffffff\r\n{}"), 413),
    "a chunk without its end": (request(CHUNKED, b"2\r\n{}0\r\n\r\n"), 400),
    "too many empty lines": (b"\r\n" * 5 + NEXT, 400),
    "a large header": (request(b"a: " + b"x" * 70_000 + b"\r\n"), 431),
    "a content length with zeros above the limit": (request(length(b"001000000000"), b"{}"), 413),
}
"""Some of each stage that refuses: `tests/gateway/http/test_request_head.py` has the whole grammar."""

ACCEPTED: dict[str, bytes] = {
    "chunks": request(CHUNKED, CHUNKS),
    "trailers": request(CHUNKED, CHUNKS[:-2] + b"x-a: b\r\n\r\n"),
    "a length with zeros": request(length(b"%012d" % len(BODY)), BODY),
    "absolute form": request(length(b"%d" % len(BODY)), BODY, b"POST http://other" + PATH + b" HTTP/1.1"),
    "empty lines": b"\r\n" * 4 + request(length(b"%d" % len(BODY)), BODY),
    "an upgrade": request(
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: A\r\n" + length(b"%d" % len(BODY)),
        BODY,
    ),
}


@contextlib.asynccontextmanager
async def connected(running: Running, *, known: bool) -> AsyncIterator[Raw]:
    """Open a connection, on which the head of `post` may be known."""
    async with Raw.to(running) as raw:
        for _ in range(2 if known else 0):
            raw.writer.write(post())
            assert (await raw.answer())[0] == 200
        yield raw


async def after_refusal(running: Running, data: bytes, *, known: bool) -> bytes:
    """Send a request that is refused, and another one behind it; return all answers but those before."""
    async with connected(running, known=known) as raw, asyncio.timeout(TIMEOUT_S):
        # The refused request is in the same read as one with the known head.
        raw.writer.write((post() if known else b"") + data + SMUGGLED)
        if known:
            assert (await raw.answer())[0] == 200
        return await raw.reader.read()


@pytest.mark.parametrize("known", [False, True])
async def test_what_is_refused(gateway_of: Start, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.http.connection._LINGER_S", 0.05)
    async with gateway_of({"a": "baseline"}) as running:
        found = await asyncio.gather(*[after_refusal(running, data, known=known) for data, _ in REFUSED.values()])
        wrong = {
            name: answers[:200]
            for (name, (_, status)), answers in zip(REFUSED.items(), found, strict=True)
            if not answers.startswith(b"HTTP/1.1 %d " % status)
            or answers.count(b"HTTP/1.1 ") != 1
            or b"\r\nconnection: close\r\n" not in answers
            or b'{"error":{"message":' not in answers
        }
        assert wrong == {}
        seen = running.upstreams["a"].seen
        assert len(seen) == (3 * len(REFUSED) if known else 0)
        assert {request.target for request in seen} <= {PATH.decode()}


@pytest.mark.parametrize("known", [False, True])
async def test_what_is_accepted(gateway_of: Start, known: bool) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        for name, data in ACCEPTED.items():
            async with connected(running, known=known) as raw:
                raw.writer.write(data + NEXT)
                assert [(await raw.answer())[0] for _ in range(2)] == [200, 200], name
            seen = running.upstreams["a"].seen[-1]
            assert (seen.target, seen.body) == (PATH.decode(), BODY), name
            assert [seen.header(name) for name in ("transfer-encoding", "upgrade", "x-a")] == [None] * 3


async def test_headers_named_in_connection_are_not_relayed(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running, Raw.to(running) as raw:
        extra = b"Connection: X-Hop, x-other ,keep-alive\r\nconnection: x-third\r\n"
        hop = b"x-hop: 1\r\nX-Other: 2\r\nx-third: 3\r\nx-end: 4\r\nkeep-alive: timeout=5\r\nte: trailers\r\n"
        raw.writer.write(post(extra=extra + hop))
        assert (await raw.answer())[0] == 200
        seen = running.upstreams["a"].seen[0]
        names = ("connection", "x-hop", "x-other", "x-third", "x-end", "keep-alive", "te")
        assert [seen.header(name) for name in names] == [None, None, None, None, "4", None, None]


async def test_headers_that_a_backend_names_in_connection_are_not_relayed(gateway_of: Start) -> None:
    extra = "Connection: X-Hop, keep-alive\r\nX-Hop: 1\r\nkeep-alive: timeout=5\r\nproxy-authenticate: x\r\n"
    hops = answering(answer("a"), headers=extra + "x-end: 2\r\n")
    async with gateway_of({"a": "baseline"}, behaviour=hops) as running:
        for _ in range(3):
            headers = (await running.chat()).headers
            names = ("connection", "x-hop", "keep-alive", "proxy-authenticate", "x-end")
            assert [headers.get(name) for name in names] == [None, None, None, None, "2"]
