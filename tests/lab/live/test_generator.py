"""The load generator against a scripted server that records the times of requests and answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from backends.http.address import Address
from lab.live.generator import Generator, Request
from lab.live.requests import CHAT, PATHS, body_of
from tests.support.upstream import Upstream, Wire, delta

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
