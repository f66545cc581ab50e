"""Queue and deadlines of a gateway on real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.backend import State
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, Start
from tests.support.upstream import Wire, delta, well
from tests.support.waiting import eventually

KEYS = [{"name": "chat", "key": "sk-chat"}, {"name": "batch", "key": "sk-batch", "priority": 10}]


def with_queue(**queue: Any) -> dict[str, Any]:
    return {"max_in_flight_per_backend": 1, **queue}


async def hang(wire: Wire) -> None:
    await wire.until_closed()


class Gate:
    """A behaviour that answers each request when the test says so."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Semaphore(0)
        self.texts: list[str] = []

    async def __call__(self, wire: Wire) -> None:
        self.texts.append(wire.seen.json["messages"][0]["content"])
        await self.may_answer.acquire()
        await well(wire)


async def pool_of(running: Running) -> Any:
    answer = await running.client.get("/admin/pool", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    return answer.json()["models"][MODEL]


@pytest.mark.slow
async def test_requests_wait_in_order_of_the_priority_of_their_keys(gateway_of: Start) -> None:
    gate = Gate()
    async with gateway_of({"a": "baseline"}, queue=with_queue(), keys=KEYS, behaviour=gate) as running:
        tasks = []
        for number, (text, key) in enumerate((("first", "chat"), ("batch", "batch"), ("chat", "chat"))):
            headers = {"authorization": f"Bearer sk-{key}"}
            tasks.append(asyncio.create_task(running.chat(text, headers=headers)))
            await eventually(lambda number=number: running.gateway.relay.queues[MODEL].waiting + 1 > number)
            await eventually(lambda: gate.texts)
        assert (await pool_of(running))["queue"]["waiting"] == 2
        page = (await running.client.get("/metrics")).text
        assert f'gateway_queue_length{{model="{MODEL}"}} 2.0' in page
        for _ in tasks:
            gate.may_answer.release()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 3
        assert gate.texts == ["first", "chat", "batch"]


@pytest.mark.slow
async def test_the_restart_of_the_only_backend_fails_no_request_of_a_queue(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, queue=with_queue(max_in_flight_per_backend=8)) as running:
        await running.upstreams["a"].die()
        await running.until(lambda: running.backend("a").state is State.DOWN)
        tasks = [asyncio.create_task(running.chat(f"request {number}")) for number in range(5)]
        await eventually(lambda: running.gateway.relay.queues[MODEL].waiting == 5)
        await running.upstreams["a"].come_back()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}


@pytest.mark.slow
async def test_a_backend_that_hangs_delays_only_the_requests_that_it_has(gateway_of: Start) -> None:
    timeouts = {"connect_s": 1.0, "first_byte_s": 600.0, "idle_s": 600.0}
    async with gateway_of(
        policy={"name": "round_robin"}, queue=with_queue(max_in_flight_per_backend=2), timeouts=timeouts
    ) as running:
        running.upstreams["a"].behaviour = hang
        hung = asyncio.create_task(running.chat("one"))
        tasks = [asyncio.create_task(running.chat(f"request {number}")) for number in range(40)]
        await eventually(lambda: sum(task.done() for task in tasks) >= 38)
        assert len(running.upstreams["a"].seen) == 2
        served = [task.result() for task in tasks if task.done()]
        assert {response.headers["x-gateway-backend"] for response in served} == {"b"}
        for task in (hung, *tasks):
            task.cancel()
        await asyncio.gather(hung, *tasks, return_exceptions=True)
        await eventually(lambda: running.upstreams["a"].aborted == 2)


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
        assert running.backend("a").state is State.UP
