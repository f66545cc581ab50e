"""Nothing of a prompt or of a key reaches the log, the gateway's error answers, or records without text."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from backends import background
from backends.background import Seldom
from gateway.relay.observers import Observer
from gateway.routing.routed_request import RoutedRequest
from gateway.telemetry.log_format import LogFormat, place_of
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, Start, bearer
from tests.gateway.service.test_access import raw
from tests.support.upstream import (
    Behaviour,
    Wire,
    answer_broken_json,
    answer_garbage,
    answer_html,
    answering,
    delta,
    hang,
    reset_connection,
)

PROMPT, KEY, WRONG_KEY = "zqxprompt", "sk-zqxkey", "sk-zqxwrong"
MARK = "zqx"
KEYS = [{"name": "team", "key": KEY}, {"name": "slow", "key": f"{KEY}-slow", "requests_per_minute": 1}]


async def breaking_off(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.chunk(delta(PROMPT))
    wire.reset()


FAULTS: list[Behaviour] = [
    *(answer_garbage, answer_html, answer_broken_json, reset_connection, hang, breaking_off),
    *(answering({"error": {"message": "no", "code": status}}, status) for status in (400, 503)),
]


async def send_all(running: Running) -> list[str]:
    """Send marked requests that end in every way; return the answers that the gateway has made itself."""
    upstream, well = running.upstreams["a"], running.upstreams["a"].behaviour
    text, key = f"{PROMPT} " * 20, bearer(KEY)
    own: list[str] = []

    async def chat(headers: dict[str, str], **fields: Any) -> httpx.Response:
        return await running.chat(text, headers=headers, **fields)

    for stream in (False, True):
        assert (await chat(key, stream=stream)).status_code == 200
    for path in ("/tokenize", "/v1/audio/transcriptions", "/v1/embeddings"):
        await running.client.post(path, json={"model": MODEL, "input": text}, headers=key)
    own += [
        (await chat({})).text,
        (await chat(bearer(WRONG_KEY))).text,
        (await chat(key, model="nope")).text,
        (await chat(key, model={"a": text})).text,
        (await chat(key | {"x-gateway-backend": "b"})).text,
        (await running.client.post("/sleep", content=text, headers=key)).text,
        (await running.client.post("/v1/completions", content=f'{{"prompt": "{text}', headers=key)).text,
        (await running.client.post("/v1/completions", content=text.encode() * 1000, headers=key)).text,
        (await running.client.get("/admin/pool", headers=key)).text,
        (await running.client.get("/admin/config", headers=bearer(ADMIN_KEY))).text,
        (await raw(running, f"/v1/completions?q={PROMPT}", "BAD METHOD", text.encode())).decode(),
        (await raw(running, "/v1/../completions", body=text.encode())).decode(),
    ]
    assert (await chat(bearer(f"{KEY}-slow"))).status_code == 200
    own.append((await chat(bearer(f"{KEY}-slow"))).text)
    for fault in FAULTS:
        upstream.behaviour = fault
        for stream in (False, True):
            response = await chat(key, stream=stream)
            if fault is not breaking_off:
                own.append(response.text)
            await running.until_up("a")
    upstream.behaviour = hang
    leaving = asyncio.create_task(chat(key))
    aborted = upstream.aborted
    await running.until(lambda: bool(running.gateway.relay.exchanges))
    leaving.cancel()
    await running.until(lambda: upstream.aborted > aborted)
    upstream.behaviour = well
    return own


class Failing:
    """A defect within the gateway, whose message quotes the request."""

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        raise ValueError(body.decode())


def recorded(folder: Path) -> list[Any]:
    lines: list[bytes] = []
    for path in folder.iterdir():
        with zstandard.open(path, "rb") as file:
            lines += bytes(file.read()).splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
async def test_no_prompt_and_no_key_is_logged_or_recorded(
    gateway_of: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caplog.handler, "formatter", LogFormat("%(levelname)s %(name)s: %(message)s"))
    for name in ("gateway", "backends", "policies", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    monkeypatch.setattr(background, "_logged", Seldom())  # what another test has had logged a moment ago
    recorder = {"path": str(tmp_path), "text": "none", "flush_s": 0.01}
    limits = {"max_body_mib": 0.1, "drain_s": 1}
    async with gateway_of({"a": "baseline"}, keys=KEYS, recorder=recorder, server=limits) as running:
        own = await send_all(running)

        running.gateway.relay.followers[MODEL].append(Failing())
        response = await running.chat(PROMPT, headers=bearer(KEY))
        assert response.status_code == 200, "what only observes a request does not fail it"
        own.append(response.text)
        own.append((await running.client.get("/metrics")).text)
    assert "observers of Failing failed" in caplog.text
    assert "ValueError" in caplog.text
    assert MARK not in caplog.text
    assert [text for text in own if MARK in text] == []
    records = recorded(tmp_path)
    assert len(records) >= 20
    assert MARK not in json.dumps(records)


def test_an_exception_is_logged_without_messages_but_with_the_way_to_it() -> None:
    def inner() -> None:
        raise KeyError(PROMPT)

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            raise RuntimeError(f"failed for {PROMPT}") from error

    try:
        outer()
    except RuntimeError as error:
        shown = LogFormat().formatException((type(error), error, error.__traceback__))
        place = place_of(error)
    assert PROMPT not in shown
    assert shown.index("KeyError") < shown.index("which led to") < shown.index("RuntimeError")
    assert "in inner" in shown
    assert place.startswith("RuntimeError at test_secrecy.py:")
