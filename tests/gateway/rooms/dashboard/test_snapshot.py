"""What the page is sent, and what is done only while somebody asks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from backends.health import State
from gateway.rooms.dashboard import room as dashboard
from tests.gateway.conftest import ADMIN, MODEL, bearer, start_gateway
from tests.gateway.rooms.dashboard.conftest import HISTORY, SNAPSHOT, snapshot
from tests.support.waiting import eventually_async


def backends_of(found: Any) -> dict[str, Any]:
    return {each["name"]: each for each in found["models"][0]["backends"]}


@pytest.mark.slow
async def test_the_past_and_the_present_are_those_of_the_counters() -> None:
    async with start_gateway() as running:

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
        await running.upstreams["a"].die()
        await running.until(lambda: running.backend("a").health.state is State.DOWN)
        assert backends_of(await snapshot(running))["a"]["engine"] is None, "what an engine told ends with it"


@pytest.mark.slow
async def test_it_says_that_answers_differ_by_replica(caplog: pytest.LogCaptureFixture) -> None:
    async with start_gateway() as running:
        assert (await snapshot(running))["models"][0]["unlike"] == []
        for name in "ab":
            running.upstreams[name].root = f"/models/{name}"
        said = "its engines have loaded /models/a and /models/b: answers differ by replica"

        async def is_said() -> bool:
            return any(each.startswith(said) for each in (await snapshot(running))["models"][0]["unlike"])

        await eventually_async(is_said)
        assert caplog.text.count(said) == 1


async def test_a_snapshot_is_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 60.0)
    async with start_gateway() as running:
        assert len({(await snapshot(running))["at_s"] for _ in range(3)}) == 1


@pytest.mark.slow
async def test_exchanges_are_followed_only_while_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "WATCHED_S", 0.2)
    async with start_gateway() as running:
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


@pytest.mark.slow
async def test_a_failed_reading_does_not_end_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_gateway() as running:
        (room,) = [room for room in running.gateway.rooms if isinstance(room, dashboard.Dashboard)]
        failures = iter([ZeroDivisionError])
        read = running.gateway.metrics.samples

        def samples() -> Any:
            for error in failures:
                raise error
            return read()

        monkeypatch.setattr(running.gateway.metrics, "samples", samples)
        before = room._points_at_s
        await running.until(lambda: room._points_at_s > before)
        assert next(failures, None) is None
