"""Requests that two parties could read differently are refused, also behind a known head."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.http import server
from tests.gateway.conftest import Running, Start
from tests.gateway.relay.test_frontends import BODY, Raw, post
from tests.support.upstream import answer, answering
from tests.support.waiting import TIMEOUT_S

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
