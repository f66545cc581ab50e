"""Large bodies: what they hold is counted before they are parsed, and they are parsed one after another."""

from __future__ import annotations

import json

import pytest

from gateway.routing.large_bodies import Turns
from tests.gateway.conftest import MODEL, Start
from tests.gateway.relay.test_frontends import Raw, post
from tests.support.upstream import answering
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"


@pytest.mark.slow
async def test_a_body_of_many_small_values_is_refused_before_it_is_parsed(gateway_of: Start) -> None:
    """Parsing it would show that its end is missing, which is another error."""
    async with gateway_of({"a": "baseline"}, keys=["sk-x"]) as running:
        headers = {"authorization": "Bearer sk-x", "content-type": "application/json"}
        body = b'{"model":"m","messages":[' + b'{"a":1},' * 2**19 + b"0]"
        refused = await running.client.post(CHAT, content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_values")
        assert "server.max_body_values" in refused.json()["error"]["message"]
        assert running.gateway.relay.limits.in_flight == 0


@pytest.mark.slow
async def test_the_bound_is_a_setting_and_bodies_that_are_no_json_have_none(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_values": 50_000}, paths=["/*"]) as running:
        few, many = ({"model": MODEL, "prompt": list(range(count))} for count in (49_000, 51_000))
        assert (await running.client.post("/v1/completions", json=few)).status_code == 200
        assert (await running.client.post("/v1/completions", json=many)).status_code == 413
        running.upstreams["a"].behaviour = answering({"text": "hi"})
        audio = bytes(range(256)) * 2**13
        assert (await running.client.post("/v1/audio/transcriptions", content=audio)).status_code == 200
        assert running.upstreams["a"].seen[-1].body == audio
        ids = b"[%b1]" % (b"1," * 2**20)
        refused = await running.client.post("/v1/completions", content=ids)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_client_that_leaves_before_its_turn_frees_its_place(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 10**6}).encode()
    monkeypatch.setattr(Turns, "_continue", lambda self: None)  # its turn does not come
    async with gateway_of({"a": "baseline"}) as running:
        limits, turns = running.gateway.relay.limits, running.gateway.relay.turns
        async with Raw.to(running) as raw:
            raw.writer.write(post(body))
            await eventually(lambda: limits.in_flight == 1)
        await eventually(lambda: limits.in_flight == 0)
        while turns._waiting:
            turns._step()
        assert running.upstreams["a"].seen == []
        assert limits.in_flight == 0
