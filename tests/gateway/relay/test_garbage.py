"""What a closed connection leaves: nothing that would wait for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json

from tests.gateway.conftest import MODEL, Running, Start
from tests.gateway.frontend.test_frontends import Raw, post
from tests.support.upstream import Wire, delta, well

OURS = ("gateway.", "backends.", "policies.", "httptools.", "uvicorn.", "uvloop.")
STREAM = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()


async def some_requests(running: Running) -> None:
    raw = await Raw.to(running)
    for _ in range(3):
        raw.writer.write(post())
        assert (await raw.answer())[0] == 200
    raw.close()


async def a_stream_left(running: Running) -> None:
    async def endless(wire: Wire) -> None:
        await wire.begin_stream()
        await wire.chunk(delta("one"))
        await wire.until_closed()

    upstream = running.upstreams["a"]
    upstream.behaviour = endless
    before = upstream.aborted
    raw = await Raw.to(running)
    raw.writer.write(post(STREAM))
    await raw.reader.readuntil(b"one")
    raw.close()
    await running.until(lambda: upstream.aborted > before)
    upstream.behaviour = well


async def a_backend_that_closes(running: Running) -> None:
    running.upstreams["a"].close_after_answer = True
    await some_requests(running)
    running.upstreams["a"].close_after_answer = False


async def test_nothing_is_left_to_be_collected(gateway_of: Start) -> None:
    kinds = (some_requests, a_stream_left, a_backend_that_closes)
    async with gateway_of({"a": "baseline"}) as running:
        for kind in kinds:
            await kind(running)
        await asyncio.sleep(0.05)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for kind in kinds:
                for _ in range(5):
                    await kind(running)
            await asyncio.sleep(0.05)
            gc.collect()
            left = [f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert [name for name in left if name.startswith(OURS)] == []
