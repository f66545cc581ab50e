"""HTTP on the wire, from correct and incorrect clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from gateway.http import server
from tests.gateway.conftest import MODEL, Running, Start

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


async def test_own_and_relayed_paths_share_a_connection(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running, Raw.to(running) as raw:
        running.upstreams["a"].version = None
        for path in (b"/health", b"/version", b"/v1/models", b"/v1/models/m", b"/version?x=1", b"/readyz"):
            raw.writer.write(b"GET %s HTTP/1.1\r\nhost: h\r\n\r\n" % path)
            assert (await raw.answer())[0] == 200
        assert [request.target for request in running.upstreams["a"].seen] == ["/version", "/version?x=1"]


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
