"""Comparisons are judged at each tick."""

from __future__ import annotations

import pytest

from gateway.rooms.compare import room


@pytest.fixture(autouse=True)
def judged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have comparisons judged at each tick."""
    monkeypatch.setattr(room, "_JUDGE_S", 0.0)
