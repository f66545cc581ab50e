"""Closed connections leave no reference cycles for the garbage collector."""

from __future__ import annotations

import gc
import json

import pytest

from tests.gateway.conftest import MODEL, Running, Start
from tests.gateway.relay.test_frontends import Raw, post
from tests.support.upstream import endless, well

OURS = ("gateway.", "backends.", "policies.", "httptools.", "uvicorn.", "uvloop.")
STREAM = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()


async def send_requests(running: Running) -> None:
    async with Raw.to(running) as raw:
        for _ in range(3):
            raw.writer.write(post())
            assert (await raw.answer())[0] == 200


async def leave_a_stream(running: Running) -> None:
    upstream = running.upstreams["a"]
    upstream.behaviour = endless
    before = upstream.aborted
    async with Raw.to(running) as raw:
        raw.writer.write(post(STREAM))
        await raw.reader.readuntil(b"one")
    await running.until(lambda: upstream.aborted > before)
    upstream.behaviour = well


async def have_the_backend_close(running: Running) -> None:
    running.upstreams["a"].close_after_answer = True
    await send_requests(running)
    running.upstreams["a"].close_after_answer = False


@pytest.mark.slow
async def test_closed_connections_leave_no_cycles(gateway_of: Start) -> None:
    scenarios = (send_requests, leave_a_stream, have_the_backend_close)
    async with gateway_of({"a": "baseline"}) as running:
        connections = running.server.connections
        before = len(connections)
        for scenario in scenarios:
            await scenario(running)
        await running.until(lambda: len(connections) == before)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for scenario in scenarios:
                for _ in range(5):
                    await scenario(running)
            await running.until(lambda: len(connections) == before)
            gc.collect()
            left = [f"{type(garbage).__module__}.{type(garbage).__qualname__}" for garbage in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert [name for name in left if name.startswith(OURS)] == []
