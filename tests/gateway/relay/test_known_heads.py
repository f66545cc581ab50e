"""Requests whose head is known from an earlier one of their connection bypass the parser, with the same results."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.http import server
from tests.gateway.conftest import MODEL, Start
from tests.gateway.relay.test_frontends import Raw, post
from tests.support.upstream import Wire, answer, delta, well

SHORT = json.dumps({"model": MODEL, "messages": []}).encode()


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}).encode()


async def echo(wire: Wire) -> None:
    await wire.json(answer(wire.seen.json["messages"][0]["content"]))


async def echoed(raw: Raw) -> str:
    """Return the text of the next answer of `echo`."""
    status, _, body = await raw.answer()
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return text.removeprefix("from ")


async def make_head_known(raw: Raw) -> None:
    for _ in range(3):
        raw.writer.write(post(chat("warm")))
        assert await echoed(raw) == "warm"


async def test_requests_split_at_any_byte(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await make_head_known(raw)
        whole = post(chat("cut"))
        body = whole.index(b"\r\n\r\n") + 4
        for cut in (1, body - 10, body - 3, body - 1, body, body + 1, len(whole) - 1):
            raw.writer.write(whole[:cut])
            await running.until_read()
            raw.writer.write(whole[cut:])
            assert await echoed(raw) == "cut"
        for byte in whole:
            raw.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await echoed(raw) == "cut"
        raw.close()


@pytest.mark.parametrize("cut", [0, 20])
async def test_pipelined_requests_with_known_heads(gateway_of: Start, cut: int) -> None:
    release = asyncio.Event()

    async def slower(wire: Wire) -> None:
        text = wire.seen.json["messages"][0]["content"]
        await asyncio.sleep(0.05 if text == "1" else 0)
        if text == "6":
            await release.wait()
        await echo(wire)

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = slower
        raw = await Raw.to(running)
        await make_head_known(raw)
        own = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
        everything = post(chat("1")) + post(chat("22")) + own + post(chat("333")) + post(chat("4"))
        raw.writer.write(everything[: len(everything) - cut])
        if cut:
            await running.until_read()
            raw.writer.write(everything[len(everything) - cut :])
        assert [await echoed(raw), await echoed(raw)] == ["1", "22"]
        assert (await raw.answer())[0] == 200
        assert [await echoed(raw), await echoed(raw)] == ["333", "4"]
        raw.writer.write(post(chat("5")))  # no longer pipelined
        assert await echoed(raw) == "5"
        raw.writer.write(post(chat("6")))
        await running.until(lambda: len(running.upstreams["a"].seen) == 9)
        raw.writer.write(post(chat("7")))  # while the previous request is in flight
        await running.until_read()
        release.set()
        assert [await echoed(raw), await echoed(raw)] == ["6", "7"]
        raw.close()


async def test_a_changed_head_is_parsed_again(gateway_of: Start) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("length", [b"1000000000", b"2097153", b"-1", b"+5", b"0x5", b"5 5", b""])
async def test_invalid_content_lengths_are_refused(gateway_of: Start, length: bytes) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_mib": 1}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await make_head_known(raw)
        head, _, _ = post().partition(b"content-length: ")
        raw.writer.write(head + b"content-length: " + length + b"\r\n\r\nhello")
        assert (await raw.answer())[0] == (413 if length.isdigit() else 400)
        assert len(running.upstreams["a"].seen) == 3
        raw.close()


async def test_clients_that_leave(gateway_of: Start) -> None:
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
        await make_head_known(raw)
        raw.writer.write(post(chat("never whole"))[:-5])
        await raw.writer.drain()
        raw.close()
        other = await Raw.to(running)
        await make_head_known(other)
        other.writer.write(post(chat("on", stream=True)))
        await other.reader.readuntil(b"one")
        other.close()
        await running.until(lambda: upstream.aborted == 1)
        assert len(upstream.seen) == 7


async def test_an_idle_connection_is_closed(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        await make_head_known(raw)
        async with asyncio.timeout(5):
            assert await raw.reader.read() == b""
        raw.close()


@pytest.mark.slow
async def test_a_connection_in_use_is_not_closed_as_idle(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(wire: Wire) -> None:
        await asyncio.sleep(0.5)  # longer than the keep-alive time
        await echo(wire)

    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = slow
        raw = await Raw.to(running)
        raw.writer.write(post(chat("a")))
        assert await echoed(raw) == "a"
        raw.writer.write(post(chat("b")))
        assert await echoed(raw) == "b"
        raw.close()


@pytest.mark.parametrize("body", ["{not JSON at all}", '{"id": "x", "usage": '])
async def test_an_answer_with_a_known_head_that_is_not_json_is_retried(gateway_of: Start, body: str) -> None:
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
        response = await running.chat()
        assert response.headers["x-gateway-backend"] == "b"
        assert response.headers["x-gateway-retried-from"] == "a"
        assert not bodies


async def test_answer_heads_that_all_differ(gateway_of: Start) -> None:
    async def numbered(wire: Wire) -> None:
        await wire.json(
            answer("a", tokens=wire.upstream.connections), headers=f"x-number: {len(wire.upstream.seen)}\r\n"
        )

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = numbered
        for number in range(1, 140):
            response = await running.chat()
            assert (response.status_code, response.headers["x-number"]) == (200, str(number))


async def test_request_heads_that_all_differ(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = echo
        raw = await Raw.to(running)
        for number in (*range(40), *[40] * 40):
            raw.writer.write(post(chat(str(number)), b"x-number: %d\r\n" % number))
            assert await echoed(raw) == str(number)
            assert running.upstreams["a"].seen[-1].header("x-number") == str(number)
        raw.close()


async def test_answers_in_pieces_are_counted_like_answers_in_one_piece(gateway_of: Start) -> None:
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
