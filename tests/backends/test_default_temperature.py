"""The default temperature of engines, as they report it."""

from __future__ import annotations

import json

import httpx
import pytest

from backends.default_temperature import reported_temperature
from tests.support.upstream import Upstream, Wire


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"object": "response", "temperature": 0.25}, 0.25),
        (200, {"object": "response"}, None),
        *((200, {"temperature": wrong}, None) for wrong in ("hot", -1, True, None)),
        (200, [], None),
        (404, {"detail": "Not Found"}, None),
    ],
)
async def test_an_engine_is_asked(status: int, body: dict[str, object], expected: float | None) -> None:
    asked: list[dict[str, object]] = []

    async def answer(wire: Wire) -> None:
        asked.append(wire.seen.json)
        text = json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(text))
        await wire.send(head + text)

    async with Upstream("a", "m") as upstream:
        upstream.behaviour = answer  # type: ignore[assignment]
        async with httpx.AsyncClient(base_url=upstream.url, trust_env=False) as client:
            assert await reported_temperature(client, "m") == expected
    assert asked == [{"model": "m", "input": "Hi", "max_output_tokens": 1, "store": False}]


async def test_an_engine_that_is_gone_reports_nothing() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1", trust_env=False) as client:
        assert await reported_temperature(client, "m") is None
