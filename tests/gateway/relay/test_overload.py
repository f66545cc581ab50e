"""Queue and deadlines of a gateway on real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.health import State
from tests.gateway.conftest import MODEL, Start
from tests.support.upstream import Wire, delta
from tests.support.waiting import eventually

KEYS = [{"name": "chat", "key": "sk-chat"}, {"name": "batch", "key": "sk-batch", "priority": 10}]


def with_queue(**queue: Any) -> dict[str, Any]:
    return {"max_in_flight_per_backend": 1, **queue}


async def hang(wire: Wire) -> None:
    await wire.until_closed()


@pytest.mark.slow
async def test_the_restart_of_the_only_backend_fails_no_request_of_a_queue(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, queue=with_queue(max_in_flight_per_backend=8)) as running:
        await running.upstreams["a"].die()
        await running.until(lambda: running.backend("a").health.state is State.DOWN)
        tasks = [asyncio.create_task(running.chat(f"request {number}")) for number in range(5)]
        await eventually(lambda: running.gateway.relay.queues[MODEL].waiting == 5)
        await running.upstreams["a"].come_back()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}


@pytest.mark.slow
async def test_at_its_deadline_a_request_is_answered_and_its_engine_stops(gateway_of: Start) -> None:
    async def endless(wire: Wire) -> None:
        if not wire.seen.json.get("stream"):
            await hang(wire)
            return
        await wire.begin_stream()
        await wire.chunk(delta("one"))
        await wire.until_closed()

    async with gateway_of({"a": "baseline"}, behaviour=endless, timeouts={"total_s": 600.0}) as running:
        for stream, aborted in ((False, 1), (True, 2)):
            response = await running.chat(stream=stream, headers={"x-request-timeout": "0.3"})
            assert response.status_code == (200 if stream else 504)
            assert '"code":"deadline_exceeded"' in response.text
            assert response.text.endswith("data: [DONE]\n\n") is stream
            await eventually(lambda aborted=aborted: running.upstreams["a"].aborted == aborted)
        response = await running.chat(headers={"x-request-timeout": "soon"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_header")
        assert running.backend("a").health.state is State.UP
