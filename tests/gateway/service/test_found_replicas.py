"""Replicas that are found while the gateway runs join it."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from backends import background
from gateway.reload.reloader import ReloadError
from gateway.service import run
from tests.support.waiting import eventually


@pytest.mark.parametrize("error", [ReloadError("failed", "no answer of worker 1"), OSError("no file")])
async def test_replicas_that_could_not_join_are_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_DISCOVERY_RETRY_S", 0.01)
    serving = Mock(_found_others=asyncio.Event())
    serving._reloader.apply_again = AsyncMock(side_effect=[error, error, None])
    serving._found_others.set()  # once: its source tells nothing more
    task = background.start("discovery", run._Serving._follow_discovery(serving))
    await eventually(lambda: serving._reloader.apply_again.await_count == 3, 5.0)
    task.cancel()
    await asyncio.wait({task})
    assert not serving._found_others.is_set()
