"""Requests whose outcome tells a policy nothing: they are no longer part of what it takes a replica to have to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policies.build import learned_of
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.upstream import Wire, hang, well


@pytest.mark.parametrize("policy", [{"name": "learned"}, {"name": "least_loaded", "outlier_ejection": True}])
async def test_what_was_refused_failed_or_sent_elsewhere_is_no_work_of_a_replica(policy: dict[str, Any]) -> None:
    async def behave(wire: Wire) -> None:
        text = wire.seen.json["messages"][0]["content"]
        if text == "stay":
            await hang(wire)
        elif text == "too long":
            await wire.json({"error": {"message": "too long", "code": 400}}, 400)
        elif text == "fails" or (text == "fails there" and wire.upstream.name == "a"):
            await wire.json({"error": {"message": "failed", "code": 500}}, 500)
        else:
            await well(wire)

    patient = {"first_byte_s": 60.0}  # those that stay, stay to the end
    async with start_gateway({"a": "eagle3", "b": "baseline"}, policy, behaviour=behave, timeouts=patient) as running:
        learned = learned_of(running.gateway.models[MODEL].policy)
        assert learned is not None
        staying = [
            asyncio.ensure_future(running.chat("stay", headers={"x-gateway-backend": name})) for name in ("a", "b")
        ]
        await running.until(lambda: all(running.backend(name).in_flight == 1 for name in "ab"))
        for text in ("too long", "fails", "fails there", "hi"):
            for stream in (False, True):
                for _ in range(4):
                    await running.chat(text, stream=stream)
        await running.until(lambda: all(running.backend(name).in_flight == 1 for name in "ab"))
        assert {name: each.sent for name, each in learned.known.replicas.items()} == {"a": 1, "b": 1}
        for each in staying:
            each.cancel()
