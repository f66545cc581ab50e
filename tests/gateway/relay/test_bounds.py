"""What a client can hold of the gateway: bytes, connections and time."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.http import server
from tests.gateway.conftest import ADMIN_KEY, MODEL, Start
from tests.gateway.relay.test_frontends import BODY, Raw, post
from tests.support.upstream import Wire, answer, well
from tests.support.waiting import TIMEOUT_S, eventually, stays

PATH = b"/v1/chat/completions"
HEAD = b"POST " + PATH + b" HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
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


async def refusal(raw: Raw) -> tuple[int, str, dict[str, str]]:
    """Return status, code and headers of the answer, and check that the connection is closed after it."""
    status, headers, body = await raw.answer()
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert await until_closed(raw) == b""
    raw.close()
    return status, json.loads(body)["error"]["code"], headers


async def dribble(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a byte every now and then, until the gateway closes the connection."""
    for byte in data:
        if writer.transport.is_closing():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


async def test_heads_are_bounded(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, paths=["/*"]) as running:
        for fits, data in [
            (True, b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"x" * 8000)),
            (False, b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"x" * 8200)),
            (True, b"GET / HTTP/1.1\r\nhost: h\r\na: %b\r\n\r\n" % (b"x" * 65_000)),
            (False, b"GET / HTTP/1.1\r\nhost: h\r\na: %b\r\n\r\n" % (b"x" * 65_536)),
            (True, b"GET / HTTP/1.1\r\nhost: h\r\n%b\r\n" % (b"a: b\r\n" * 99)),
            (False, b"GET / HTTP/1.1\r\nhost: h\r\n%b\r\n" % (b"a: b\r\n" * 100)),
            (False, b"GET /%b" % (b"x" * 8300)),
            (False, b"GET / HTTP/1.1\r\na: %b" % (b"x" * 65_536)),
            (False, b"GET / HTTP/1.1\r\n%b" % (b"a: b\r\n" * 101)),
        ]:
            raw = await Raw.to(running)
            raw.writer.write(data)
            if fits:
                assert (await raw.answer())[0] == 200
                raw.close()
            else:
                status, code, _ = await refusal(raw)
                assert (status, code) in {(414, "target_too_long"), (431, "headers_too_large")}


async def test_the_bound_of_bodies_holds_on_all_paths(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 0.01}) as running:
        for path in (PATH, b"/admin/explain", b"/admin/drain", b"/health", b"/v1/models", b"/metrics", b"/nope"):
            begin = b"POST %b HTTP/1.1\r\nhost: h\r\n%b" % (path, ADMIN)
            texts = set()
            for data in (
                begin + b"content-length: 10486\r\n\r\n",
                begin + b"transfer-encoding: chunked\r\n\r\n28f6\r\n",
                begin + b"transfer-encoding: chunked\r\n\r\n28f5\r\n" + b"x" * 10485 + b"\r\n1\r\n",
            ):
                raw = await Raw.to(running)
                raw.writer.write(data)
                status, _, body = await raw.answer()
                assert status == 413, (path, data[:200])
                texts.add(body)
                raw.close()
            assert len(texts) == 1, "one text for one error"
        assert running.upstreams["a"].seen == []


@pytest.mark.parametrize("data", [b"", b"POST / HTTP/1.1\r\nhost: h\r\nx-slow: " + b"y" * 1000])
async def test_a_head_must_be_complete_in_time(gateway_of: Start, data: bytes) -> None:
    async with gateway_of({"a": "baseline"}, server={"head_s": 0.3}) as running:
        raw = await Raw.to(running)
        sending = asyncio.create_task(dribble(raw.writer, data))
        if data:
            assert (await refusal(raw))[:2] == (408, "request_timeout")
        else:
            assert await until_closed(raw) == b""
            raw.close()
        await sending
        assert (await running.chat()).status_code == 200


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_must_be_complete_in_time(gateway_of: Start, known: bool, chunked: bool) -> None:
    async with gateway_of({"a": "baseline"}, server={"body_s": 0.3}) as running:
        raw = await Raw.to(running)
        for _ in range(3 if known else 0):
            raw.writer.write(post())
            assert (await raw.answer())[0] == 200
        if chunked:
            raw.writer.write(b"POST " + PATH + b" HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        else:
            raw.writer.write(HEAD % 2000)
        sending = asyncio.create_task(dribble(raw.writer, b"1\r\nx\r\n" * 300))
        assert (await refusal(raw))[:2] == (408, "request_timeout")
        await sending
        assert len(running.upstreams["a"].seen) == (3 if known else 0)


@pytest.mark.slow
async def test_time_to_answer_is_not_time_to_send(gateway_of: Start) -> None:
    async def late(wire: Wire) -> None:
        await asyncio.sleep(0.8)
        await wire.json(answer("a"))

    async with gateway_of({"a": "baseline"}, server={"head_s": 0.2, "body_s": 0.2}) as running:
        running.upstreams["a"].behaviour = late
        raw = await Raw.to(running)
        raw.writer.write(post() + post()[:20])  # the beginning of the next one waits with it
        assert (await raw.answer())[0] == 200
        raw.writer.write(post()[20:])
        assert (await raw.answer())[0] == 200
        raw.close()


async def test_connections_are_bounded(gateway_of: Start, caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    async def held(wire: Wire) -> None:
        await release.wait()
        await wire.json(answer("a"))

    async with gateway_of({"a": "baseline"}, server={"max_connections": 4}) as running:
        connections = running.server.connections
        running.upstreams["a"].behaviour = held
        first, second, busy = [await Raw.to(running) for _ in range(3)]
        await eventually(lambda: len(connections) == 3)
        for raw in (second, first):  # the first was used last
            raw.writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
            assert (await raw.answer())[0] == 200
        busy.writer.write(post())
        await eventually(lambda: len(running.upstreams["a"].seen) == 1)
        others = [await Raw.to(running) for _ in range(2)]
        assert await until_closed(second) == b"", "the one that was idle for longest makes room"
        second.close()
        for raw in (first, *others):
            raw.writer.write(post())
        await eventually(lambda: len(running.upstreams["a"].seen) == 4)
        for _ in range(2):
            status, code, headers = await refusal(await Raw.to(running))
            assert (status, code, headers["retry-after"]) == (503, "overloaded", "2")
        release.set()
        for raw in (first, busy, *others):
            assert (await raw.answer())[0] == 200
            raw.close()
        await eventually(lambda: not connections)
        assert (await running.chat()).status_code == 200
    assert len([record for record in caplog.records if "connections are in use" in record.message]) == 1


async def test_the_largest_unfinished_request_is_refused(gateway_of: Start) -> None:
    """A client that stalls a large body pays for it, not those whose bodies come after."""
    settings = {"max_body_mib": 1, "max_unfinished_mib": 1}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 250_000}]}).encode()
    async with gateway_of({"a": "baseline"}, server=settings) as running:
        large = await Raw.to(running)
        large.writer.write(HEAD % 1_000_000 + b"x" * 700_000)
        others = [await Raw.to(running) for _ in range(3)]
        for raw in others:
            raw.writer.write(post(body)[:-10])
        status, code, headers = await refusal(large)
        assert (status, code, headers["retry-after"]) == (503, "overloaded", "2")
        for raw in others:
            raw.writer.write(post(body)[-10:])
            assert (await raw.answer())[0] == 200
            raw.close()
        assert len(running.upstreams["a"].seen) == 3
        assert all(not connection.held_bytes for connection in running.server.connections)


REFUSED = b"GET /v1/chat/completions HTTP/1.1\r\nhost: h\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n"


async def test_pipelined_refusals(gateway_of: Start, caplog: pytest.LogCaptureFixture) -> None:
    count = 5000
    async with gateway_of({"a": "baseline"}, keys=["sk-x"]) as running:
        raw = await Raw.to(running)
        raw.writer.write(REFUSED * count)
        with caplog.at_level(logging.INFO):
            statuses = {(await raw.answer())[0] for _ in range(count)}
        assert statuses == {401}
        assert len([record for record in caplog.records if not record.name.startswith("httpx")]) < 5
        raw.writer.write(post(extra=b"x-api-key: sk-x\r\n"))
        assert (await raw.answer())[0] == 200
        raw.close()


@pytest.mark.parametrize("data", [REFUSED, METRICS])
async def test_a_client_that_pipelines_and_does_not_read(gateway_of: Start, data: bytes) -> None:
    """The gateway stops reading; it neither queues the requests nor their answers."""
    count = 50_000_000 // len(data)
    async with gateway_of({"a": "baseline"}, keys=["sk-x"]) as running:
        raw = await Raw.to(running)
        await eventually(lambda: running.server.connections)
        (connection,) = running.server.connections
        sending = asyncio.create_task(send(raw.writer, data, count))
        await eventually(lambda: connection._reader._is_paused and connection._slow_since_s)
        await stays(lambda: connection._reader.pending and len(connection._reader.pending) < 350_000, 0.2)
        assert connection._transport.get_write_buffer_size() < 100_000
        assert not sending.done()
        statuses = {(await raw.answer())[0] for _ in range(300)}
        assert statuses == {401 if data == REFUSED else 200}
        sending.cancel()
        raw.close()


async def test_what_waits_behind_a_request_is_bounded(gateway_of: Start) -> None:
    async def endless(wire: Wire) -> None:
        await wire.until_closed()

    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    async with gateway_of({"a": "baseline"}, timeouts={"first_byte_s": 600.0}) as running:
        running.upstreams["a"].behaviour = endless
        raw = await Raw.to(running)
        sending = asyncio.create_task(send(raw.writer, post(body), 100))
        await eventually(lambda: running.upstreams["a"].seen)
        (connection,) = running.server.connections
        await eventually(lambda: connection._reader._is_paused)
        await stays(lambda: 0 < connection.held_bytes < 350_000, 0.2)
        assert not sending.done()
        sending.cancel()
        raw.close()
        running.upstreams["a"].behaviour = well
        assert (await running.chat()).status_code == 200


async def send(writer: asyncio.StreamWriter, data: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(data)
        await writer.drain()


async def test_a_pipelining_client_that_leaves_is_noticed(gateway_of: Start) -> None:
    async def endless(wire: Wire) -> None:
        await wire.until_closed()

    async with gateway_of({"a": "baseline"}, timeouts={"first_byte_s": 600.0}) as running:
        running.upstreams["a"].behaviour = endless
        raw = await Raw.to(running)
        raw.writer.write(post() * 3)
        await eventually(lambda: len(running.upstreams["a"].seen) == 1)
        raw.close()
        await eventually(lambda: running.upstreams["a"].aborted == 1)
        await eventually(lambda: not running.gateway.relay.exchanges)
        assert len(running.upstreams["a"].seen) == 1


@pytest.mark.parametrize("known", [False, True])
async def test_requests_behind_a_refusal_are_dropped(
    gateway_of: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Refused before its body, while the rest of the body and more requests still come."""
    monkeypatch.setattr("gateway.http.connection._LINGER_S", 3.0)  # longer than a busy machine takes to send them
    keys: list[Any] = ["sk-x"]
    async with gateway_of({"a": "baseline"}, keys=keys) as running:
        raw = await Raw.to(running)
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
        raw.close()
        assert running.upstreams["a"].seen == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_refusal_is_read_by_a_client_that_is_still_sending(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.connection._LINGER_S", 2.0)
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 1}) as running:
        raw = await Raw.to(running)
        raw.writer.write(HEAD % 3_000_000 + b"x" * 3_000_000)
        await raw.writer.drain()
        status, headers, _ = await raw.answer()
        assert (status, headers["connection"]) == (413, "close")
        raw.close()


async def test_other_clients_are_served_meanwhile(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 1}) as running:
        slow = [await Raw.to(running) for _ in range(30)]
        for number, raw in enumerate(slow):
            raw.writer.write((HEAD % 1000 + b"x" * 10) if number % 2 else b"POST / HT")
        assert [(await running.chat()).status_code for _ in range(3)] == [200] * 3
        for raw in slow:
            raw.close()
        await running.client.aclose()
        await eventually(lambda: not running.server.connections)
