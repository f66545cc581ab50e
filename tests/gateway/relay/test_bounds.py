"""What a client can hold of the gateway: bytes, connections, time, and memory after it has left."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from gateway.http import server
from tests.gateway.conftest import ADMIN_KEY, MODEL, Start
from tests.gateway.relay.test_frontends import BODY, Raw, post
from tests.support.upstream import hang, well
from tests.support.waiting import TIMEOUT_S, eventually, stays

PATH = b"/v1/chat/completions"
HEAD = b"POST " + PATH + b" HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
PATIENT = {"first_byte_s": 600.0}
ADMIN = b"authorization: Bearer %b\r\n" % ADMIN_KEY.encode()


@pytest.fixture(autouse=True)
def _often_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.http.connection._LINGER_S", 0.05)


async def until_closed(raw: Raw) -> bytes:
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return await raw.reader.read()
        except ConnectionResetError:  # it was still sending
            return b""


async def test_the_bound_of_bodies_holds_on_all_paths(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 0.01}) as running:
        for path in (PATH, b"/admin/explain", b"/admin/drain", b"/health", b"/v1/models", b"/metrics", b"/nope"):
            begin = b"POST %b HTTP/1.1\r\nhost: h\r\n%b" % (path, ADMIN)
            for data in (
                begin + b"content-length: 10486\r\n\r\n",
                begin + b"transfer-encoding: chunked\r\n\r\n28f5\r\n" + b"x" * 10485 + b"\r\n1\r\n",
            ):
                async with Raw.to(running) as raw:
                    raw.writer.write(data)
                    assert (await raw.answer())[0] == 413, (path, data[:200])
        assert running.upstreams["a"].seen == []


async def test_pipelined_refusals(gateway_of: Start, caplog: pytest.LogCaptureFixture) -> None:
    count = 500
    async with gateway_of({"a": "baseline"}, keys=["sk-x"]) as running, Raw.to(running) as raw:
        raw.writer.write(b"GET /v1/chat/completions HTTP/1.1\r\nhost: h\r\n\r\n" * count)
        with caplog.at_level(logging.INFO):
            statuses = {(await raw.answer())[0] for _ in range(count)}
        assert statuses == {401}
        assert len([record for record in caplog.records if not record.name.startswith("httpx")]) < 5
        raw.writer.write(post(extra=b"x-api-key: sk-x\r\n"))
        assert (await raw.answer())[0] == 200


async def send(writer: asyncio.StreamWriter, data: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(data)
        await writer.drain()


@pytest.mark.slow
async def test_what_waits_behind_a_request_is_bounded(gateway_of: Start) -> None:
    """The gateway stops reading."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    async with gateway_of({"a": "baseline"}, behaviour=hang, timeouts=PATIENT) as running, Raw.to(running) as raw:
        sending = asyncio.create_task(send(raw.writer, post(body), 100))
        await eventually(lambda: running.upstreams["a"].seen)
        (connection,) = running.server.connections
        await eventually(lambda: connection._is_paused)
        await stays(lambda: 0 < connection.held_bytes < 350_000, 0.2)
        assert not sending.done()
        sending.cancel()
        raw.close()
        running.upstreams["a"].behaviour = well
        assert (await running.chat()).status_code == 200


async def test_a_pipelining_client_that_leaves_is_noticed(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, behaviour=hang, timeouts=PATIENT) as running, Raw.to(running) as raw:
        raw.writer.write(post() * 3)
        await eventually(lambda: len(running.upstreams["a"].seen) == 1)
        raw.close()
        await eventually(lambda: running.upstreams["a"].aborted == 1)
        await eventually(lambda: not running.gateway.relay.exchanges)
        assert len(running.upstreams["a"].seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
async def test_requests_behind_a_refusal_are_dropped(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Refused before its body, while the rest of the body and more requests still come."""
    monkeypatch.setattr("gateway.http.connection._LINGER_S", 1.0)  # longer than a busy machine takes to send them
    async with gateway_of({"a": "baseline"}, keys=["sk-x"]) as running, Raw.to(running) as raw:
        for _ in range(3 if known else 0):
            raw.writer.write(post())
            assert (await raw.answer())[0] == 401
        raw.writer.write(post()[: -len(BODY)])
        status, headers, _ = await raw.answer()
        assert (status, headers["connection"]) == (401, "close")
        raw.writer.write(BODY)
        for _ in range(3):
            raw.writer.write(post())
            await running.until_read()
        assert await until_closed(raw) == b""
        assert running.upstreams["a"].seen == []


async def test_a_refusal_is_read_by_a_client_that_is_still_sending(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.connection._LINGER_S", 1.0)
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 1}) as running, Raw.to(running) as raw:
        raw.writer.write(HEAD % 3_000_000 + b"x" * 3_000_000)
        await raw.writer.drain()
        status, headers, _ = await raw.answer()
        assert (status, headers["connection"]) == (413, "close")
