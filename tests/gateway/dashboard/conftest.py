"""Reading a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from gateway.dashboard import dashboard
from tests.gateway.conftest import ADMIN_KEY, Running

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
EVENTS, SNAPSHOT = "/admin/dashboard/events", "/admin/dashboard/snapshot"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have snapshots and points made without long pauses."""
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 0.02)
    monkeypatch.setattr(dashboard, "POINT_S", 0.1)


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """Yield the name and the document of each event of a stream."""
    name = ""
    async for line in response.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, orjson.loads(value)


@contextlib.asynccontextmanager
async def opened(running: Running, headers: dict[str, str] = ADMIN) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Open a stream, and yield its events."""
    async with running.client.stream("GET", EVENTS, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events(response)


async def snapshot(running: Running) -> Any:
    response = await running.client.get(SNAPSHOT, headers=ADMIN)
    return response.raise_for_status().json()
