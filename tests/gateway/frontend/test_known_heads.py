"""Requests whose head came before on their connection: answered as any other, however they are cut or changed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.frontend import uvicorn
from tests.gateway.conftest import MODEL, Start, start_gateway
from tests.gateway.frontend.test_frontends import Raw, post
from tests.support.upstream import Wire, answer, delta, well

SHORT = json.dumps({"model": MODEL, "messages": []}).encode()


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}).encode()


async def echo(wire: Wire) -> None:
    await wire.json(answer(wire.seen.json["messages"][0]["content"]))


async def told(raw: Raw) -> str:
    status, _, body = await raw.answer()
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return text.removeprefix("from ")


async def warm(raw: Raw) -> None:
    for _ in range(3):
        raw.writer.write(post(chat("warm")))
        assert await told(raw) == "warm"


async def test_they_go_past_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    slow = uvicorn.HttpToolsProtocol.data_received

    def note(self: uvicorn.HttpToolsProtocol, data: bytes) -> None:
        parsed.append(data)
        slow(self, data)

    monkeypatch.setattr(uvicorn.HttpToolsProtocol, "data_received", note)
    async with start_gateway({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await warm(raw)
        before = len(parsed)
        for number in range(12):
            raw.writer.write(post(chat("x" * number)))
            assert await told(raw) == "x" * number
        assert len(parsed) == before
        raw.close()


async def test_cut_anywhere(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await warm(raw)
        whole = post(chat("cut"))
        body = whole.index(b"\r\n\r\n") + 4
        for cut in (1, body - 10, body - 3, body - 1, body, body + 1, len(whole) - 1):
            for part in (whole[:cut], whole[cut:]):
                raw.writer.write(part)
                await raw.writer.drain()
                await asyncio.sleep(0.005)
            assert await told(raw) == "cut"
        for byte in whole:
            raw.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await told(raw) == "cut"
        raw.close()


@pytest.mark.parametrize("cut", [0, 20])
async def test_pipelined(gateway_of: Start, cut: int) -> None:
    async def slower(wire: Wire) -> None:
        await asyncio.sleep(0.05 if wire.seen.json["messages"][0]["content"] == "1" else 0)
        await echo(wire)

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = slower
        raw = await Raw.to(running)
        await warm(raw)
        own = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
        everything = post(chat("1")) + post(chat("22")) + own + post(chat("333")) + post(chat("4"))
        raw.writer.write(everything[: len(everything) - cut])
        if cut:
            await raw.writer.drain()
            await asyncio.sleep(0.005)
            raw.writer.write(everything[len(everything) - cut :])
        assert [await told(raw), await told(raw)] == ["1", "22"]
        assert (await raw.answer())[0] == 200
        assert [await told(raw), await told(raw)] == ["333", "4"]
        raw.writer.write(post(chat("5")))  # one after the other again
        assert await told(raw) == "5"
        raw.writer.write(post(chat("6")))
        await asyncio.sleep(0.005)
        raw.writer.write(post(chat("7")))  # while the one before is under way
        assert [await told(raw), await told(raw)] == ["6", "7"]
        raw.close()


async def test_another_head_is_another_request(gateway_of: Start) -> None:
    key = b"authorization: Bearer sk-right\r\n"
    keys = [{"name": "k", "key": "sk-right", "may_override": True}]
    async with gateway_of({"a": "baseline", "b": "ngram"}, keys=keys) as running:
        raw = await Raw.to(running)
        for _ in range(3):
            raw.writer.write(post(SHORT, key))
            assert (await raw.answer())[0] == 200
        for backend in ("a", "b", "a", "a"):
            raw.writer.write(post(SHORT, key + b"x-gateway-backend: %b\r\n" % backend.encode()))
            assert (await raw.answer())[1]["x-gateway-backend"] == backend
        raw.writer.write(post(SHORT, key.replace(b"right", b"wrong")))
        assert (await raw.answer())[0] == 401
        raw.writer.write(post(SHORT, key))
        assert (await raw.answer())[0] == 200
        raw.writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await raw.answer())[0] == 200
        raw.writer.write(post(SHORT, key))
        assert (await raw.answer())[0] == 200
        raw.close()


@pytest.mark.parametrize("length", [b"1000000000", b"2097153", b"-1", b"+5", b"0x5", b"5 5", b""])
async def test_a_length_that_cannot_be(gateway_of: Start, length: bytes) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 1}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await warm(raw)
        head, _, _ = post().partition(b"content-length: ")
        raw.writer.write(head + b"content-length: " + length + b"\r\n\r\nhello")
        assert (await raw.answer())[0] == (413 if length.isdigit() else 400)
        assert len(running.upstreams["a"].seen) == 3
        raw.close()


async def test_the_client_leaves(gateway_of: Start) -> None:
    async def begin(wire: Wire) -> None:
        if not wire.seen.json.get("stream"):
            await echo(wire)
            return
        await wire.begin_stream()
        await wire.chunk(delta("one"))
        await wire.until_closed()

    async with gateway_of({"a": "baseline"}) as running:
        upstream = running.upstreams["a"]
        upstream.behaviour = begin
        raw = await Raw.to(running)
        await warm(raw)
        raw.writer.write(post(chat("never whole"))[:-5])
        await raw.writer.drain()
        raw.close()
        other = await Raw.to(running)
        await warm(other)
        other.writer.write(post(chat("on", stream=True)))
        await other.reader.readuntil(b"one")
        other.close()
        await running.until(lambda: upstream.aborted == 1)
        assert len(upstream.seen) == 7


async def test_an_idle_connection_is_closed(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn, "_SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await warm(raw)
        async with asyncio.timeout(5):
            assert await raw.reader.read() == b""
        raw.close()


async def test_a_connection_that_is_used_stays(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(wire: Wire) -> None:
        await asyncio.sleep(0.5)  # longer than a connection may be idle
        await echo(wire)

    monkeypatch.setattr(uvicorn, "_SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = slow
        raw = await Raw.to(running)
        raw.writer.write(post(chat("a")))
        assert await told(raw) == "a"
        raw.writer.write(post(chat("b")))
        assert await told(raw) == "b"
        raw.close()


@pytest.mark.parametrize("body", ["{not JSON at all}", '{"id": "x", "usage": '])
async def test_an_answer_of_a_known_head_that_is_no_json_is_asked_for_elsewhere(gateway_of: Start, body: str) -> None:
    bodies = [json.dumps(answer("a"))] * 4 + [body]

    async def same_head(wire: Wire) -> None:
        text = bodies.pop(0).ljust(400).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        await wire.send(head.encode() + text)

    policy = {"name": "static", "backend": "a"}
    async with gateway_of({"a": "baseline", "b": "ngram"}, policy=policy) as running:
        running.upstreams["a"].behaviour = same_head
        for _ in range(4):
            assert (await running.chat()).headers["x-gateway-backend"] == "a"
        got = await running.chat()
        assert got.headers["x-gateway-backend"] == "b"
        assert got.headers["x-gateway-retried-from"] == "a"
        assert not bodies


async def test_heads_that_differ_each_time(gateway_of: Start) -> None:
    async def numbered(wire: Wire) -> None:
        await wire.json(
            answer("a", tokens=wire.upstream.connections), headers=f"x-number: {len(wire.upstream.seen)}\r\n"
        )

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = numbered
        for number in range(1, 140):
            got = await running.chat()
            assert (got.status_code, got.headers["x-number"]) == (200, str(number))


async def test_heads_of_requests_that_differ_each_time(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        for number in (*range(40), *[40] * 40):
            raw.writer.write(post(chat(str(number)), b"x-number: %d\r\n" % number))
            assert await told(raw) == str(number)
            assert running.upstreams["a"].seen[-1].header("x-number") == str(number)
        raw.close()


async def test_answers_are_counted_the_same_however_they_come(gateway_of: Start) -> None:
    async def in_pieces(wire: Wire) -> None:
        text = json.dumps(answer("a")).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        await wire.send(head + text[:10])
        await asyncio.sleep(0.01)
        await wire.send(text[10:])

    async with gateway_of({"a": "baseline"}) as running:
        for number in range(8):
            running.upstreams["a"].behaviour = well if number % 2 else in_pieces
            assert (await running.chat()).json() == answer("a")
        page = (await running.client.get("/metrics")).text
        label = f'{{backend="a",method="baseline",model="{MODEL}"}}'
        assert f"gateway_prompt_tokens_total{label} {8 * 7:.1f}" in page
        assert f"gateway_output_tokens_total{label} {8 * 3:.1f}" in page
        assert f"gateway_e2e_seconds_count{label} 8.0" in page
        assert f'gateway_key_tokens_total{{key="anonymous"}} {8 * 10:.1f}' in page
