"""Asking for the data of the page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.rooms.dashboard import room as dashboard
from tests.gateway.conftest import Running, start_gateway

HISTORY, SNAPSHOT = "/admin/dashboard/history", "/admin/dashboard/snapshot"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between snapshots and between points."""
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 0.0)
    monkeypatch.setattr(dashboard, "POINT_S", 0.1)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with start_gateway() as started:
        yield started


async def snapshot(running: Running) -> Any:
    return await running.admin("dashboard/snapshot")
