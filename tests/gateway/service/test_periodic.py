"""Work of a gateway process beside requests goes on, whatever a part of it raises, and failures are counted."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from backends import background
from gateway.reload.reloader import ReloadError
from gateway.service import run
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.upstream import Wire
from tests.support.waiting import eventually


async def silent(wire: Wire) -> None:
    await wire.until_closed()


def broken(*_: object) -> Any:
    raise ZeroDivisionError


class FailsThrice(list[Any]):
    failures = 3

    def __iter__(self) -> Any:
        self.failures -= 1
        return super().__iter__() if self.failures < 0 else broken()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["a room", "what has left", "the tick itself"])
async def test_requests_time_out_although_something_else_raises(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[str] = []
    monkeypatch.setattr(background, "on_failure", [counts.append])
    timeouts = {"connect_s": 5.0, "first_byte_s": 0.5, "idle_s": 1.0}
    async with start_gateway({"a": "baseline"}, behaviour=silent, timeouts=timeouts) as running:
        gateway = running.gateway
        if part == "a room":
            monkeypatch.setattr(gateway.rooms[0], "tick", broken)
        elif part == "the tick itself":
            monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
            monkeypatch.setattr(gateway, "rooms", FailsThrice())
        else:
            gateway.leaving += [broken, lambda: True]
        assert (await running.chat()).status_code == 504
        await running.until(lambda: counts.count("tick") >= 3)
        assert gateway.leaving in ([], [broken])


@pytest.mark.parametrize("work", ["advice", "fleet", "beliefs"])
async def test_a_model_that_cannot_be_looked_at_stops_no_other(work: str) -> None:
    async with start_gateway(policy={"name": "learned", "seed": 0}) as running:
        gateway: Any = running.gateway
        rooms = {type(room).__name__: room for room in gateway.rooms}
        gateway.models = {"broken": object(), **gateway.models}
        if work == "advice":
            assert [*(await running.admin("advice"))["models"]] == [MODEL]
        elif work == "fleet":
            for _ in range(2):
                await rooms["FleetRoom"]._work()
            assert len(rooms["FleetRoom"].fleets[MODEL].minutes) == 1
        else:
            rooms["Dashboard"]._is_watched = True
            await rooms["Dashboard"]._read()
            assert rooms["Dashboard"]._beliefs[MODEL].json is not None
        del gateway.models["broken"]


# Replicas that are found


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
