"""Asking for the data of the page."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.rooms.dashboard import room as dashboard
from tests.gateway.conftest import Running

HISTORY, SNAPSHOT = "/admin/dashboard/history", "/admin/dashboard/snapshot"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have snapshots and points made without long pauses."""
    monkeypatch.setattr(dashboard, "SNAPSHOT_S", 0.0)
    monkeypatch.setattr(dashboard, "POINT_S", 0.1)


async def snapshot(running: Running) -> Any:
    return await running.admin("dashboard/snapshot")
