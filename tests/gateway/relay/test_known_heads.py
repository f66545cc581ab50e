"""Requests whose head is known from an earlier one of their connection bypass the parser, with the same results."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.http import server
from tests.gateway.conftest import MODEL, Start
from tests.gateway.relay.test_frontends import Raw, post
from tests.support.upstream import Wire, answer

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


async def test_a_changed_head_is_parsed_again(gateway_of: Start) -> None:
    key = b"authorization: Bearer sk-right\r\n"
    keys = [{"name": "k", "key": "sk-right", "may_override": True}]
    async with gateway_of({"a": "baseline", "b": "ngram"}, keys=keys) as running, Raw.to(running) as raw:
        for _ in range(3):
            raw.writer.write(post(SHORT, key))
            assert (await raw.answer())[0] == 200
        for backend in ("a", "b", "a", "a"):
            raw.writer.write(post(SHORT, key + b"x-gateway-backend: %b\r\n" % backend.encode()))
            assert (await raw.answer())[1]["x-gateway-backend"] == backend
        known, wrong = post(SHORT, key), post(SHORT, key.replace(b"right", b"wrong"))
        for sent in (wrong, known, b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n", known):
            raw.writer.write(sent)
            assert (await raw.answer())[0] == (401 if sent is wrong else 200)


@pytest.mark.slow
async def test_whether_there_is_a_body_is_judged_for_each_request(gateway_of: Start) -> None:
    options = b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
    health = b"GET /health HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
    async with gateway_of({"a": "baseline"}, keys=[{"name": "k", "key": "sk-right"}]) as running:
        for head, status in ((options, 401), (health, 400)):
            async with Raw.to(running) as raw:
                for _ in range(2):
                    raw.writer.write(head % 0)
                    assert (await raw.answer())[0] == 200
                raw.writer.write(head % 5 + b"hello")
                assert (await raw.answer())[0] == status
        assert [seen.body for seen in running.upstreams["a"].seen] == [b""] * 2


@pytest.mark.slow
async def test_an_idle_connection_is_closed(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}, behaviour=echo) as running, Raw.to(running) as raw:
        await make_head_known(raw)
        async with asyncio.timeout(5):
            assert await raw.reader.read() == b""


@pytest.mark.slow
async def test_a_connection_in_use_is_not_closed_as_idle(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(wire: Wire) -> None:
        await asyncio.sleep(0.3)  # longer than the keep-alive time
        await echo(wire)

    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    monkeypatch.setattr("gateway.service.server._KEEP_ALIVE_S", 0.2)
    async with gateway_of({"a": "baseline"}, behaviour=slow) as running, Raw.to(running) as raw:
        raw.writer.write(post(chat("a")))
        assert await echoed(raw) == "a"
        raw.writer.write(post(chat("b")))
        assert await echoed(raw) == "b"
