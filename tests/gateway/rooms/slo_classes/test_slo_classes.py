"""Latency objectives of requests, from their headers, their key or their class."""

from __future__ import annotations

import asyncio

import pytest

from gateway.rooms.dashboard import room as dashboard
from gateway.routing.routed_request import RoutedRequest
from tests.gateway.conftest import ADMIN, MODEL, Running, bearer, start_gateway
from tests.support.upstream import Wire, well
from tests.support.waiting import eventually_async

CLASSES = {"interactive": {"ttft_ms": 60000, "tpot_ms": 60000}, "now": {"ttft_ms": 1}, "batch": {"tpot_ms": 60000}}
KEYS = [
    {"name": "chat", "key": "sk-chat", "slo_class": "interactive"},
    {"name": "plain", "key": "sk-plain"},
    {"name": "own", "key": "sk-own", "slo": {"ttft_ms": 60000}},
]


async def slowly(wire: Wire) -> None:
    """Answer after a moment, and one prompt with an error."""
    await asyncio.sleep(0.01)
    if wire.seen.json["messages"][0]["content"] == "fail":
        await wire.json({"error": {"message": "out of memory"}}, status=500)
    else:
        await well(wire)


async def counted(running: Running) -> dict[tuple[str, str], int]:
    """Return the requests by class and outcome."""
    await running.client.get("/metrics")
    counts = {}
    for each in running.gateway.metrics.samples():
        if each.name == "gateway_slo_requests_total":
            counts[each.labels["slo_class"], each.labels["outcome"]] = int(each.value)
    return counts


@pytest.mark.slow
async def test_requests_are_judged_by_the_objective_of_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 0.0)
    monkeypatch.setattr(dashboard, "POINT_S", 0.1)
    policy = {"name": "learned", "objective": "goodput"}
    async with start_gateway({"a": "baseline"}, policy, behaviour=slowly, keys=KEYS, slo_classes=CLASSES) as running:

        async def page() -> dict[str, dict[str, int]]:
            found = await running.admin("dashboard/snapshot")
            return {each["name"]: each for each in found["models"][0]["classes"]}

        async def ask(key: str, text: str = "hi", *, slo_class: str = "", stream: bool = True) -> int:
            headers = bearer(f"sk-{key}") | ({"x-slo-class": slo_class} if slo_class else {})
            return (await running.chat(text, headers=headers, stream=stream)).status_code

        assert await page() == {}
        for key, slo_class, stream in [
            ("chat", "", True),
            ("chat", "", False),
            ("chat", "now", True),
            ("chat", "now", False),  # which nothing tells
            ("plain", "batch", True),
            ("plain", "", True),
            ("own", "", True),
        ]:
            assert await ask(key, slo_class=slo_class, stream=stream) == 200
        assert await ask("chat", "fail") == 500
        assert await ask("plain", slo_class="instant") == 400
        assert await counted(running) == {
            ("interactive", "kept"): 2,
            ("interactive", "failed"): 1,
            ("now", "missed"): 1,
            ("batch", "kept"): 1,
            ("", "kept"): 1,
        }

        async def is_shown() -> bool:
            return len(found := await page()) == 4 and found["interactive"]["requests"] == 3

        await eventually_async(is_shown)
        assert (await page())["interactive"]["kept"] == 2


async def test_a_class_that_is_not_there_is_answered_with_those_that_are() -> None:
    policy = {"name": "least_loaded"}
    async with start_gateway({"a": "baseline"}, policy, slo_classes=CLASSES) as running:
        refused = await running.chat(headers={"x-slo-class": "instant"})
        assert refused.json()["error"]["message"] == "x-slo-class is 'instant'; expected interactive, now, batch."
        for header, value in (("x-slo-ttft-ms", "-1"), ("x-slo-tpot-ms", "soon")):
            refused = await running.chat(headers={header: value})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_header")
            assert header in refused.json()["error"]["message"]
        assert running.upstreams["a"].seen == []
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        headers = {**ADMIN, "x-slo-class": "now"}
        explained = (await running.client.post("/admin/explain", json=body, headers=headers)).json()
        assert explained["features"]["slo_ttft_s"] == pytest.approx(0.001)
    async with start_gateway({"a": "baseline"}, policy) as running:
        refused = await running.chat(headers={"x-slo-class": "instant"})
        assert "the gateway has no slo_classes" in refused.json()["error"]["message"]


async def test_requests_without_an_objective_are_judged_by_that_of_the_model() -> None:
    policy = {"name": "learned", "slo": {"ttft_ms": 60000, "tpot_ms": 0.001}}
    async with start_gateway({"a": "baseline"}, policy, slo_classes=CLASSES) as running:
        assert (await running.chat(stream=True)).status_code == 200
        assert (await running.chat(stream=True, headers={"x-slo-class": "interactive"})).status_code == 200
        assert (await running.chat(stream=True, headers={"x-slo-tpot-ms": "60000"})).status_code == 200
        assert await counted(running) == {("default", "missed"): 1, ("interactive", "kept"): 1, ("", "kept"): 1}


OWN_KEYS = [
    {"name": "quick", "key": "sk-quick", "slo": {"ttft_ms": 300, "tpot_ms": 25}},
    {"name": "half", "key": "sk-half", "slo": {"tpot_ms": 40}},
    {"name": "plain", "key": "sk-plain"},
]
BOUNDS = [
    ("quick", {}, 0.3, 0.025),
    ("quick", {"x-slo-ttft-ms": "1000"}, 1.0, 0.025),
    ("quick", {"x-slo-ttft-ms": "1000", "x-slo-tpot-ms": "1"}, 1.0, 0.001),
    ("half", {"x-slo-ttft-ms": "500"}, 0.5, 0.04),
    ("half", {}, None, 0.04),
    ("plain", {}, None, None),
]


async def test_the_objective_of_a_key_applies_to_requests_without_headers() -> None:
    policy = {"name": "learned", "objective": "goodput", "slo": {"ttft_ms": 9000}}
    async with start_gateway({"a": "baseline", "b": "baseline"}, policy, keys=OWN_KEYS) as running:
        seen: list[tuple[float | None, float | None]] = []

        class Follow:
            def follow(self, routed: RoutedRequest, body: bytes) -> None:
                seen.append((routed.features.slo_ttft_s, routed.features.slo_tpot_s))

        running.gateway.relay.followers[MODEL].append(Follow())
        for key, headers, ttft_s, tpot_s in BOUNDS:
            assert (await running.chat(headers={**bearer(f"sk-{key}"), **headers})).status_code == 200
            assert seen.pop() == (ttft_s and pytest.approx(ttft_s), tpot_s and pytest.approx(tpot_s))
