"""Where a silent drafter and slow steps show, and what ends that."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.silence import silence

GUARDED = {"name": "least_loaded", "outlier_ejection": True}


async def shown(running: Running) -> Any:
    return (await running.admin("pool"))["models"][MODEL]["backends"]["b"]["drafter_silent"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"name": "learned", "seed": 0}, GUARDED])
async def test_a_silent_drafter_is_shown_until_its_engine_restarts(policy: dict[str, Any]) -> None:
    async with start_gateway(policy=policy) as running:
        detector = running.gateway.models[MODEL].detector
        assert detector is not None
        assert await shown(running) is None
        await running.chat()
        silence(detector, "b")
        assert await shown(running) == {
            "cause": "unknown",
            "since_s": 0.0,
            "expected_tokens_per_step": 2.0,
            "tokens_per_step": 1.0,
        }
        on_page = await running.on_page()
        assert on_page["a"]["silence"] is None
        assert on_page["b"]["silence"] == "its drafter is silent: 0% of the accepted drafts that were expected"
        assert await running.counted("gateway_backend_drafter_silent", backend="b", cause="unknown") == 1
        notes = await running.notes()
        assert "its drafter is silent: 0% of the accepted drafts" in notes["b"]
        assert "silent" not in notes["a"]

        metrics = running.upstreams["b"].metrics
        for started in (b"1.0", b"2.0"):
            running.upstreams["b"].metrics = metrics + b"process_start_time_seconds " + started + b"\n"
            await running.until(lambda at_s=float(started): _started_s(running) == at_s)  # type: ignore[misc]
        assert await shown(running) is None
        silence(detector, "b")
        assert (await shown(running))["cause"] == "since_restart"


def _started_s(running: Running) -> float:
    engine = running.backend("b").engine.metrics
    assert engine is not None
    return engine.started_s


async def test_slow_steps_are_shown() -> None:
    async with start_gateway(policy=GUARDED) as running:
        detector = running.gateway.models[MODEL].detector
        assert detector is not None
        await running.chat(headers={"x-gateway-backend": "b"})
        for _ in range(12):
            detector.observe_speed("b", 4.0, None, time.time())
        page = await running.on_page()
        assert page["b"]["outlier"] == "its steps take 4.0 times as long as expected"
        assert 2.0 < page["b"]["slowdown"] <= 4.01
        assert (page["a"]["outlier"], page["a"]["slowdown"]) == (None, 1.0)
        assert page["b"]["fitted_step_s"] > 0.0
        for _ in range(12):
            detector.observe_speed("b", 1.0, None, time.time())
        assert not detector.reasons


async def test_the_policy_is_told_whose_answer_it_learns_from() -> None:
    keys = [{"name": "team", "key": "sk-team"}]
    async with start_gateway(policy={"name": "learned", "seed": 0}, keys=keys) as running:
        seen: list[tuple[str, bool]] = []
        model = running.gateway.models[MODEL]
        model.observe = lambda outcome: seen.append((outcome.request.client, outcome.request.restricted))
        await running.chat(bad_words=["the"], headers={"authorization": "Bearer sk-team"})
        (client,) = running.gateway.relay.access.keyring.clients
        await running.until(lambda: seen == [(client.id, True)])
