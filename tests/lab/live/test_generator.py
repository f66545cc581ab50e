"""The load generator against a scripted server that records the times of requests and answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from backends.http.address import Address
from lab.live.generator import Generator, Request
from lab.live.requests import CHAT, PATHS, body_of
from tests.support.upstream import Upstream, Wire, delta
from tests.support.waiting import eventually

REQUEST = Request(PATHS[CHAT], body_of(CHAT, "m", "hi", 3), [(b"x-a", b"b")])
END = delta("x") + b"data: [DONE]\n\n"


@pytest.fixture
async def server() -> AsyncIterator[Upstream]:
    async with Upstream("a", "m") as upstream:
        yield upstream


def generator_for(url: str, due_s: Sequence[float], timeout_s: float = 5.0) -> Generator:
    return Generator(Address.parse(url), lambda _: REQUEST, due_s, [("authorization", "Bearer k")], timeout_s=timeout_s)


@pytest.mark.slow
async def test_chunks_are_recorded_when_they_arrive(server: Upstream) -> None:
    sent: list[float] = []

    async def slow(wire: Wire) -> None:
        await wire.begin_stream()
        for _ in range(20):
            await asyncio.sleep(0.005)
            sent.append(time.perf_counter())
            await wire.chunk(delta("x"))
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.end_stream()

    server.behaviour = slow
    generator = generator_for(server.url, [0.0])
    await generator.run()
    delays = np.array(generator.records[0].chunks_s) - np.array(sent)
    assert delays.min() > 0
    assert np.median(delays) < 0.002


@pytest.mark.slow
async def test_requests_are_sent_on_time_regardless_of_the_answers(server: Upstream) -> None:
    free = asyncio.Event()
    arrived: list[float] = []

    async def hold(wire: Wire) -> None:
        arrived.append(time.perf_counter())
        await free.wait()
        await wire.begin_stream()
        await wire.chunk(END)
        await wire.end_stream()

    server.behaviour = hold
    due_s = [0.05 * index for index in range(10)]
    generator = generator_for(server.url, due_s)
    running = asyncio.create_task(generator.run())
    await eventually(lambda: len(arrived) == 10)
    assert not running.done()
    free.set()
    health = await running
    offsets = np.array(arrived) - (generator.records[0].due_s - due_s[0])
    assert np.all(offsets >= np.array(due_s) - 0.001)
    assert np.median(offsets - due_s) < 0.02
    assert health.late_s < 0.5
    assert all(record.error is None for record in generator.records)


async def refuse(wire: Wire) -> None:
    await wire.json({"error": {"message": "no such parameter", "code": 400}}, 400)


async def break_off(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.chunk(delta("x"))
    wire.reset()


async def hang(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.chunk(delta("x"))
    await wire.until_closed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "error", "detail"),
    [(refuse, "http 400", "no such parameter"), (break_off, "broken", ""), (hang, "timeout", "longer than --timeout")],
)
async def test_failures_are_recorded_by_kind_and_do_not_stop_the_run(
    server: Upstream, behaviour: Callable[[Wire], object], error: str, detail: str
) -> None:
    well = server.behaviour

    async def only_the_first(wire: Wire) -> None:
        await (behaviour(wire) if len(server.seen) == 1 else well(wire))  # type: ignore[misc]

    server.behaviour = only_the_first
    generator = generator_for(server.url, [0.0, 0.05, 0.05], timeout_s=0.3)
    await generator.run()
    assert [record.error for record in generator.records] == [error, None, None]
    assert detail in generator.records[0].detail
    await eventually(lambda: server.aborted == (error == "timeout"))
