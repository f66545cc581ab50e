"""The load generator against a scripted server that records the times of requests and answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from backends.http.client import Address, UpstreamClient
from lab.bench.generator import Generator, HttpSender
from lab.bench.prompts import Prompt, RequestFormat
from lab.bench.record import Record
from tests.support.upstream import Upstream, Wire, delta
from tests.support.waiting import eventually

BODY = RequestFormat("chat", "m").body(Prompt("hi", output_tokens=3))


@pytest.fixture
async def server() -> AsyncIterator[Upstream]:
    async with Upstream("a", "m") as upstream:
        yield upstream


def sender_to(url: str, timeout_s: float = 5.0, headers: list[tuple[str, str]] | None = None) -> HttpSender:
    return HttpSender(UpstreamClient(Address.parse(url)), "/v1/chat/completions", headers or [], timeout_s)


def generator_for(server: Upstream, ended: Callable[[Record], None] | None = None, timeout_s: float = 5.0) -> Generator:
    return Generator(sender_to(server.url, timeout_s), lambda _index: BODY, ended)


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
    generator = generator_for(server)
    await generator.closed_loop(1, 3, None)
    recorded = np.concatenate([record.chunks_s for record in generator.records])
    assert recorded.size == 60
    delays = recorded - np.array(sent)
    assert delays.min() > 0
    assert np.median(delays) < 0.002


@pytest.mark.slow
async def test_an_open_loop_sends_on_time_regardless_of_the_answers(server: Upstream) -> None:
    free = asyncio.Event()
    arrived: list[float] = []

    async def hold(wire: Wire) -> None:
        arrived.append(time.perf_counter())
        await free.wait()
        await wire.begin_stream()
        await wire.chunk(delta("x") + b"data: [DONE]\n\n")
        await wire.end_stream()

    server.behaviour = hold
    due_s = [0.05 * index for index in range(10)]
    generator = generator_for(server)
    running = asyncio.create_task(generator.open_loop(due_s))
    await eventually(lambda: len(arrived) == 10)
    assert not running.done()
    free.set()
    health = await running
    offsets = np.array(arrived) - generator.start_s
    assert np.all(offsets >= np.array(due_s) - 0.001)
    assert np.median(offsets - due_s) < 0.02
    assert len(health.late_s) == 10
    assert max(health.late_s) < 0.5
    assert all(record.error is None for record in generator.records)


@pytest.mark.slow
async def test_a_closed_loop_keeps_its_concurrency(server: Upstream) -> None:
    now, peak = 0, 0

    async def count(wire: Wire) -> None:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0.01)
        now -= 1
        await wire.begin_stream()
        await wire.chunk(delta("x") + b"data: [DONE]\n\n")
        await wire.end_stream()

    server.behaviour = count
    ended: list[int] = []
    generator = generator_for(server, lambda record: ended.append(record.index))
    await generator.closed_loop(4, 30, None)
    assert peak == 4
    assert sorted(ended) == list(range(30))
    assert server.connections <= 5  # connections are reused


@pytest.mark.slow
async def test_a_duration_stops_sending_but_not_the_answers(server: Upstream) -> None:
    generator = generator_for(server)
    begun = time.perf_counter()
    await generator.closed_loop(2, None, 0.3)
    assert time.perf_counter() - begun >= 0.3
    assert len(generator.records) > 2
    assert max(record.sent_s for record in generator.records) - generator.start_s < 0.3 + 1.0  # on a busy machine
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
@pytest.mark.parametrize(("behaviour", "error"), [(refuse, "http 400"), (break_off, "broken"), (hang, "timeout")])
async def test_failures_are_recorded_by_kind_and_do_not_stop_the_run(
    server: Upstream, behaviour: Callable[[Wire], object], error: str
) -> None:
    well, turn = server.behaviour, 0

    async def every_other(wire: Wire) -> None:
        nonlocal turn
        turn += 1
        await (behaviour(wire) if turn % 2 else well(wire))  # type: ignore[misc]

    server.behaviour = every_other
    generator = generator_for(server, timeout_s=0.3)
    await generator.closed_loop(1, 6, None)
    assert [record.error for record in generator.records] == [error, None] * 3
    if error == "http 400":
        assert "no such parameter" in generator.records[0].detail
    if error == "timeout":
        assert server.aborted == 3


async def test_an_unreachable_server_is_a_connect_failure() -> None:
    async with Upstream("gone", "m") as gone:
        url = gone.url
    generator = Generator(sender_to(url), lambda _index: BODY)
    await generator.closed_loop(2, 4, None)
    assert [record.error for record in generator.records] == ["connect"] * 4


async def test_a_closed_loop_stops_early_on_a_dead_server() -> None:
    async with Upstream("gone", "m") as gone:
        url = gone.url
    generator = Generator(sender_to(url), lambda _index: BODY)
    begun = time.perf_counter()
    await generator.closed_loop(2, None, 30.0)
    assert time.perf_counter() - begun < 10.0
    assert len(generator.records) < 200


async def test_stopping_keeps_the_finished_requests(server: Upstream) -> None:
    well = server.behaviour

    async def two_then_hang(wire: Wire) -> None:
        await (well(wire) if len(server.seen) <= 2 else hang(wire))

    server.behaviour = two_then_hang
    generator = generator_for(server)
    running = asyncio.create_task(generator.closed_loop(2, 100, None))
    await eventually(lambda: len(server.seen) >= 4)
    generator.stop()
    await asyncio.wait_for(running, 2.0)
    assert sorted(record.error or "" for record in generator.records) == ["", "", "interrupted", "interrupted"]
    await eventually(lambda: server.aborted == 2)  # the engine sees the closed connections


async def test_headers_and_length_are_sent(server: Upstream) -> None:
    generator = Generator(sender_to(server.url, headers=[("authorization", "Bearer k"), ("x-a", "b")]), lambda _: BODY)
    await generator.closed_loop(1, 1, None)
    (seen,) = server.seen
    assert (seen.header("authorization"), seen.header("x-a")) == ("Bearer k", "b")
    assert seen.json["stream_options"] == {"include_usage": True}
    assert (seen.method, seen.target) == ("POST", "/v1/chat/completions")
