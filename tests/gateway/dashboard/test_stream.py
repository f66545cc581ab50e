"""The stream: what it costs nobody who is slow, how many there may be, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.config.settings import KeySettings, TimeoutSettings
from gateway.dashboard import pages
from gateway.routing.keys import digest
from gateway.service.change import prepare
from tests.gateway.conftest import ADMIN_KEY, Running, Start
from tests.gateway.dashboard.conftest import ADMIN, EVENTS, opened, snapshot
from tests.support.waiting import TIMEOUT_S, eventually, eventually_async


async def test_it_begins_with_the_past_and_goes_on_with_snapshots(gateway_of: Start) -> None:
    async with gateway_of() as running, opened(running) as stream:
        name, history = await anext(stream)
        assert name == "history"
        assert {each["backend"] for each in history["backends"]} == {"a", "b"}
        assert len(history["backends"][0]["values"]) == len(history["series"])
        assert len(history["backends"][0]["values"][0]) == len(history["at_s"]) > 0
        at_s = [document["at_s"] for name, document in [await anext(stream) for _ in range(5)] if name == "snapshot"]
        assert len(at_s) == 5
        assert sorted(set(at_s)) == at_s


async def test_all_streams_get_the_same_snapshots(gateway_of: Start) -> None:
    async with gateway_of() as running, opened(running) as one, opened(running) as other:
        await anext(one)  # the past
        await anext(other)
        seen: tuple[dict[float, Any], dict[float, Any]] = {}, {}
        async with asyncio.timeout(TIMEOUT_S):
            while len(seen[0].keys() & seen[1].keys()) < 3:
                for snapshots, stream in zip(seen, (one, other), strict=True):
                    document = (await anext(stream))[1]
                    snapshots[document["at_s"]] = document
        common = seen[0].keys() & seen[1].keys()
        assert all(seen[0][at_s] == seen[1][at_s] for at_s in common)
        assert seen[0][max(common)]["process"]["dashboards"] == 2


async def test_their_number_has_a_bound(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGES", 2)
    async with gateway_of() as running:
        async with opened(running) as one, opened(running) as other:
            await anext(one)
            await anext(other)
            refused = await running.client.get(EVENTS, headers=ADMIN)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_dashboards")
            assert refused.headers["retry-after"] == "10"

        async def is_closed() -> bool:
            return bool((await snapshot(running))["process"]["dashboards"] == 0)

        await eventually_async(is_closed, what="clients that left are noticed")
        async with opened(running) as again:
            await anext(again)


async def test_streams_without_a_key_leave_half_of_the_places(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_PAGES", 4)
    async with gateway_of(dashboard={"public": True}) as running, contextlib.AsyncExitStack() as stack:
        streams = []  # one that nobody refers to is closed
        for headers in ({}, {"authorization": "Bearer wrong"}):
            streams.append(await stack.enter_async_context(opened(running, headers)))
            await anext(streams[-1])
        refused = await running.client.get(EVENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_dashboards")
        for _ in range(2):
            streams.append(await stack.enter_async_context(opened(running)))
            await anext(streams[-1])
        assert (await running.client.get(EVENTS, headers=ADMIN)).status_code == 503


async def test_nothing_follows_requests_while_no_page_is_open(gateway_of: Start) -> None:
    async with gateway_of(policy={"name": "learned", "shadow_drafting": {"sample": 0}}) as running:
        followers = running.gateway.relay.followers["m"]
        policy: Any = running.gateway.models["m"].policy
        await running.chat()
        assert followers == []
        async with opened(running) as stream:
            await anext(stream)
            await running.until(lambda: len(followers) == 1)
            await running.chat()
        await running.until(lambda: followers == [])
        await running.chat()
        assert policy.explain_candidates is False


@contextlib.asynccontextmanager
async def slow_reader(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """Open a stream, and read it no more; yields its reader and the gateway's transport, which has paused."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it connects
    slow.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=slow, limit=2**12)
    writer.write(f"GET {EVENTS} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {ADMIN_KEY}\r\n\r\n".encode())
    await reader.readuntil(b"event: history")
    served: Any = max(running.server.connections, key=lambda each: each._since_s)
    served._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    await eventually(lambda: served._slow_since_s > 0, what="the client is too slow")
    try:
        yield reader, served._transport
    finally:
        writer.transport.abort()


async def test_a_slow_reader_skips_snapshots(gateway_of: Start) -> None:
    async with gateway_of() as running, slow_reader(running) as (reader, transport):
        held_bytes = transport.get_write_buffer_size()
        async with opened(running) as stream:
            for _ in range(50):
                newest = (await anext(stream))[1]
        assert transport.get_write_buffer_size() <= held_bytes + 2**16 < 2**18, "it was sent no more"
        times: list[float] = []
        async with asyncio.timeout(TIMEOUT_S):
            while not times or times[-1] < newest["at_s"]:
                if found := re.match(rb'data: {"format":1,"at_s":([0-9.]+),', await _line(reader)):
                    times.append(float(found[1]))
        gap_s = max(after - before for before, after in itertools.pairwise(times))
        assert gap_s > 40 * 0.02, "it skipped most of those in between, and then got the newest"


async def test_the_stream_of_a_slow_reader_ends_when_the_gateway_drains(gateway_of: Start) -> None:
    async with gateway_of(server={"drain_s": 3600.0}) as running, slow_reader(running):
        running.server.drain()
        await running.until(lambda: not running.server.tasks)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return a line, or the beginning of one that is too long."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)


async def test_it_ends_when_the_gateway_drains(gateway_of: Start) -> None:
    slow = {"drain_s": 3600.0}
    async with gateway_of(server=slow) as running, opened(running) as stream, opened(running) as other:
        await anext(stream)
        await anext(other)
        running.server.drain()
        async with asyncio.timeout(TIMEOUT_S):
            assert [name async for name, _ in stream if name == "history"] == []
            async for _ in other:
                pass


async def _reload(running: Running, **changed: Any) -> None:
    settings = running.gateway.settings.model_copy(update=changed)
    change = await prepare(running.gateway, settings, list(running.gateway.pool), digest(ADMIN_KEY))
    change.commit()


async def test_it_ends_when_its_key_may_have_gone_and_else_follows_the_models(gateway_of: Start) -> None:
    viewer = {"name": "viewer", "key": "sk-viewer", "admin": "read"}
    headers = {"authorization": "Bearer sk-viewer"}
    async with gateway_of(keys=[viewer]) as running, opened(running, headers) as stream:
        await anext(stream)
        await _reload(running, timeouts=TimeoutSettings(connect_s=1.5))
        for _ in range(3):
            assert (await anext(stream))[0] == "snapshot"
        await running.until(lambda: len(running.gateway.relay.followers["m"]) == 1)
        await _reload(running, keys=[KeySettings(name="viewer", key="sk-other", admin="read")])
        async with asyncio.timeout(TIMEOUT_S):
            async for _ in stream:
                pass
        assert (await running.client.get(EVENTS, headers=headers)).status_code == 401


async def test_it_has_the_advice_of_whoever_gives_some(gateway_of: Start) -> None:
    async def advise() -> dict[str, Any]:
        return {"m": {"findings": [{"rule": "draft_length"}]}, "n": {"findings": []}}

    async with gateway_of() as running:
        assert (await snapshot(running))["advice"] is None
        running.gateway.advise = advise
        async with opened(running) as stream:
            async with asyncio.timeout(TIMEOUT_S):
                async for name, document in stream:
                    if name == "snapshot" and document["advice"]:
                        break
            assert document["advice"] == [{"rule": "draft_length"}]


async def test_it_ends_when_the_client_leaves(gateway_of: Start) -> None:
    async with gateway_of() as running:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
            async with client.stream("GET", EVENTS, headers=ADMIN) as response:
                await anext(response.aiter_raw())
        # no task is left
        await running.until(lambda: not running.server.tasks)
