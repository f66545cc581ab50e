"""Where a silent drafter shows, and what ends its silence."""

from __future__ import annotations

from typing import Any

import pytest

from policies.roles import Freezable
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, start_gateway

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
GUARDED = {"name": "least_loaded", "outlier_ejection": True}


async def shown(running: Running) -> Any:
    answer = await running.client.get("/admin/pool", headers=ADMIN)
    return answer.json()["models"][MODEL]["backends"]["b"]["drafter_silent"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"name": "learned", "seed": 0}, GUARDED])
async def test_a_silent_drafter_is_shown_until_its_engine_restarts(policy: dict[str, Any]) -> None:
    async with start_gateway(policy=policy) as running:
        learned = running.gateway.models[MODEL].policy
        assert isinstance(learned, Freezable)
        assert await shown(running) is None
        await running.chat()
        for _ in range(6):
            learned.drafters.observe("b", "ngram:5", 2.0, 1.0, 0.0)
        assert await shown(running) == {
            "cause": "unknown",
            "since_s": 0.0,
            "expected_tokens_per_step": 2.0,
            "tokens_per_step": 1.0,
        }
        dashboard = (await running.client.get("/admin/dashboard/snapshot", headers=ADMIN)).json()["models"][0][
            "backends"
        ]
        silences = {each["name"]: each["silence"] for each in dashboard}
        assert silences["a"] is None
        assert "1.00 tokens per step where 2.00" in silences["b"]
        page = (await running.client.get("/metrics")).text
        labels = f'backend="b",cause="unknown",method="ngram",model="{MODEL}"'
        assert f"gateway_backend_drafter_silent{{{labels}}} 1.0" in page
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        explained = (await running.client.post("/admin/explain", json=body, headers=ADMIN)).json()
        notes = {each["backend"]: each["note"] for each in explained["candidates"]}
        assert "its drafter is silent: 1.00 tokens per step" in notes["b"]
        assert "silent" not in notes["a"]

        metrics = running.upstreams["b"].metrics
        for started in (b"1.0", b"2.0"):
            running.upstreams["b"].metrics = metrics + b"process_start_time_seconds " + started + b"\n"
            await running.until(lambda at_s=float(started): _started_s(running) == at_s)
        assert await shown(running) is None
        for _ in range(6):
            learned.drafters.observe("b", "ngram:5", 2.0, 1.0, 0.0)
        assert (await shown(running))["cause"] == "since_restart"


def _started_s(running: Running) -> float:
    engine = running.gateway.pool.engine(running.backend("b"))
    assert engine is not None
    return engine.started_s


async def test_the_policy_is_told_whose_answer_it_learns_from() -> None:
    keys = [{"name": "team", "key": "sk-team"}]
    async with start_gateway(policy={"name": "learned", "seed": 0}, keys=keys) as running:
        seen: list[tuple[str, bool]] = []
        model = running.gateway.models[MODEL]
        model.observe = lambda outcome: seen.append((outcome.request.client, outcome.request.restricted))
        await running.chat(bad_words=["the"], headers={"authorization": "Bearer sk-team"})
        (client,) = running.gateway.relay.access.keyring.clients
        await running.until(lambda: seen == [(client.id, True)])
