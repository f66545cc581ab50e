"""A gateway that compares, and judges at each tick."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.rooms.compare import room
from tests.gateway.conftest import Running
from tests.gateway.rooms.compare.support import with_state


@pytest.fixture(autouse=True)
def judged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge comparisons at each tick."""
    monkeypatch.setattr(room, "_JUDGE_S", 0.0)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Running]:
    """A gateway with two replicas of either method."""
    async with with_state(tmp_path) as running:
        yield running
