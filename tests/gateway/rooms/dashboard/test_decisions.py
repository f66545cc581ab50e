"""Sampled decisions of policies that learn and that do not, of requests that fail, and of a policy that is broken."""

from __future__ import annotations

from typing import Any

import pytest

from backends.health import Drain
from gateway.rooms.dashboard import decisions
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.gateway.rooms.dashboard.conftest import snapshot
from tests.support.upstream import Wire, well


@pytest.fixture(autouse=True)
def sample_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "SAMPLE_S", 0.0)


async def decisions_after(running: Running, requests: int, **fields: Any) -> list[dict[str, Any]]:
    """Send requests while somebody asks for snapshots, and return the decisions sampled."""
    await snapshot(running)
    for _ in range(requests):
        await running.chat("a secret", **fields)
    found: list[dict[str, Any]] = (await snapshot(running))["models"][0]["decisions"]
    return found


async def test_a_policy_that_scores_nothing_shows_the_load_before_the_request() -> None:
    async with start_gateway(policy={"name": "least_loaded"}) as running:
        (decision,) = await decisions_after(running, 1, temperature=0.3, stream=True)
        assert [each["score"] for each in decision["candidates"]] == [None, None]
        assert [each["in_flight"] for each in decision["candidates"]] == [0, 0]
        assert decision["propensity"] == 0.5
        assert decision["reason"] == "fewest_in_flight"
        assert decision["predicted_s"] is None
        assert decision["request"]["temperature"] == 0.3
        assert decision["ended"]["outcome"] == "ok"
        assert "secret" not in str(decision)


async def test_learned_scores_what_it_minimises_and_tells_what_it_predicted() -> None:
    policy = {"name": "learned", "shadow_drafting": {"sample": 0}, "guardrail": {"share": 0.0}}
    async with start_gateway(policy=policy) as running:
        found = await decisions_after(running, 12)
        assert len(found) == 12
        for decision in found:
            scores = {each["backend"]: each["score"] for each in decision["candidates"]}
            assert scores[decision["backend"]] == min(scores.values())
            chosen = next(each for each in decision["candidates"] if each["backend"] == decision["backend"])
            assert chosen["predicted_s"] == decision["predicted_s"] > 0
            assert decision["ended"]["e2e_s"] > 0


async def test_only_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "SHOWN", 3)
    async with start_gateway() as running:
        found = await decisions_after(running, 8)
        assert [each["number"] for each in found] == [6, 7, 8]


async def test_a_retried_request_shows_both_decisions() -> None:
    async def broken(wire: Wire) -> None:
        if wire.upstream.name == "a":
            await wire.json({"error": "broken"}, 500)
        else:
            await well(wire)

    async with start_gateway(policy={"name": "static", "backend": "a"}, behaviour=broken) as running:
        first, second = await decisions_after(running, 1)
        assert (first["backend"], first["ended"]["outcome"]) == ("a", "retried")
        assert (second["backend"], second["ended"]["outcome"]) == ("b", "ok")


async def test_a_recorder_keeps_its_explanations(tmp_path: Any) -> None:
    policy = {"name": "learned", "shadow_drafting": {"sample": 0}}
    async with start_gateway(policy=policy, recorder={"path": str(tmp_path)}) as running:
        await decisions_after(running, 2)
        explaining: Any = running.gateway.models[MODEL].policy
        assert explaining.explain_candidates is True


async def test_a_request_that_is_never_sent_leaves_nothing_behind() -> None:
    async with start_gateway(policy={"name": "learned", "shadow_drafting": {"sample": 0}}) as running:
        for backend in running.gateway.pool:
            running.gateway.pool.report(backend, Drain())
        assert await decisions_after(running, 1) == []
        explaining: Any = running.gateway.models[MODEL].policy
        assert explaining.explain_candidates is False
