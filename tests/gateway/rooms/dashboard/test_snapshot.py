"""What the page is sent: counters, sampled decisions, and nothing while nobody asks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from backends.health import State
from gateway.rooms.dashboard import decisions
from gateway.rooms.dashboard import room as dashboard
from tests.gateway.conftest import ADMIN, MODEL, Running, bearer, start_gateway
from tests.gateway.rooms.dashboard.conftest import HISTORY, SNAPSHOT, snapshot
from tests.support.upstream import Wire, well
from tests.support.waiting import eventually_async


def backends_of(found: Any) -> dict[str, Any]:
    return {each["name"]: each for each in found["models"][0]["backends"]}


@pytest.mark.slow
async def test_the_past_and_the_present_are_those_of_the_counters(running: Running) -> None:
    async def is_read() -> bool:
        return bool((await snapshot(running))["points_at_s"])

    await eventually_async(is_read)
    for _ in range(4):
        await running.chat(stream=True)

    async def counted() -> bool:
        found = backends_of(await snapshot(running))
        return sum(each["ttft"]["count"] for each in found.values() if each["ttft"]) == 4

    await eventually_async(counted)
    found, past = await snapshot(running), await running.admin("dashboard/history")
    assert found["format"] == past["format"] == dashboard.FORMAT
    assert found["points_at_s"] == past["at_s"][-1]
    assert {each["backend"] for each in past["backends"]} == set(backends_of(found)) == {"a", "b"}
    for each in past["backends"]:
        assert len(each["values"]) == len(past["series"]) == len(backends_of(found)[each["backend"]]["point"])
        assert {len(values) for values in each["values"]} == {len(past["at_s"])}
    assert sum(each["requests_per_s"] for each in backends_of(found).values()) > 0
    assert backends_of(found)["a"]["state"] == "up"
    assert backends_of(found)["a"]["engine"] is not None
    assert found["models"][0]["unlike"] == []
    for name in "ab":
        running.upstreams[name].root = f"/models/{name}"

    async def is_said() -> bool:
        return "answers differ by replica" in str((await snapshot(running))["models"][0]["unlike"])

    await eventually_async(is_said)
    await running.upstreams["a"].die()
    await running.until(lambda: running.backend("a").health.state is State.DOWN)
    assert backends_of(await snapshot(running))["a"]["engine"] is None, "what an engine told ends with it"


async def test_a_snapshot_is_made_once_for_all_who_ask(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 60.0)
    assert len({(await snapshot(running))["at_s"] for _ in range(3)}) == 1


async def test_a_snapshot_that_cannot_be_made_is_made_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(dashboard.Dashboard, "_document", lambda _: 1 / 0)
        assert (await running.client.get(SNAPSHOT, headers=ADMIN)).status_code == 500
    assert (await running.admin("dashboard/snapshot"))["models"]


@pytest.mark.slow
async def test_exchanges_are_followed_only_while_somebody_asks(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "WATCHED_S", 0.2)
    before = len(running.gateway.relay.followers[MODEL])
    await snapshot(running)
    assert len(running.gateway.relay.followers[MODEL]) == before + 1
    await running.until(lambda: len(running.gateway.relay.followers[MODEL]) == before)


async def test_it_tells_no_key_no_address_and_no_text() -> None:
    keys = [{"name": "zqxname", "key": "sk-zqxkey"}]
    async with start_gateway(keys=keys) as running:
        await snapshot(running)
        await running.chat("zqxprompt", headers=bearer("sk-zqxkey"))
        for path in (SNAPSHOT, HISTORY):
            text = (await running.client.get(path, headers=ADMIN)).text
            assert MODEL in text
            assert not re.search("zqx|127.0.0.1", text)


@pytest.fixture(autouse=True)
def sample_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "SAMPLE_S", 0.0)


async def decisions_after(running: Running, requests: int, **fields: Any) -> list[dict[str, Any]]:
    """Send requests while somebody asks for snapshots, and return the decisions sampled."""
    await snapshot(running)
    for _ in range(requests):
        await running.chat("a secret", **fields)
    return (await snapshot(running))["models"][0]["decisions"]


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


async def test_learned_scores_what_it_minimises_and_tells_what_it_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"name": "learned", "shadow_drafting": {"sample": 0}, "guardrail": {"share": 0.0}}
    async with start_gateway(policy=policy) as running:
        monkeypatch.setattr(decisions, "SHOWN", 3)
        found = await decisions_after(running, 8)
        assert [each["number"] for each in found] == [6, 7, 8], "the last of them"
        for decision in found:
            scores = {each["backend"]: each["score"] for each in decision["candidates"]}
            assert scores[decision["backend"]] == min(scores.values())
            chosen = next(each for each in decision["candidates"] if each["backend"] == decision["backend"])
            assert chosen["predicted_s"] == decision["predicted_s"] > 0
            assert decision["ended"]["e2e_s"] > 0


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
