"""A real gateway before four real replicas, which the tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest_asyncio

from benchmarks.faults.asking import Work
from benchmarks.faults.load import Ask, Load, numbers
from benchmarks.faults.stage import Stage
from benchmarks.faults.systems import gateway
from benchmarks.systems import System
from tests.support.waiting import eventually_async

QUICK: dict[str, Any] = {
    "health": {"interval_s": 0.2, "timeout_s": 0.5, "eject_s": 0.5, "eject_max_s": 0.5, "slow_start_s": 0}
}
"""Sections of the pool file: replicas come back soon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(tmp_path_factory: Any) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("faults")
    stage = Stage(System("gateway", lambda site: gateway(site, "least_loaded", state="none", **QUICK)), folder)
    async with stage:
        yield stage
    assert stage.orphans == 0


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared_stage: Stage) -> AsyncIterator[Stage]:
    """The stage with all replicas in service; at the end of a test nothing may be in flight."""
    await eventually_async(lambda: _all_up(shared_stage), what="all replicas in service")
    yield shared_stage
    assert await shared_stage.until_idle(30.0) is not None, "requests are left in flight"


async def _all_up(stage: Stage) -> bool:
    """Return whether all replicas are up; send what one on trial needs, which earns retries for the next test."""
    load = Load(stage.port)
    for number in islice(numbers, 20):
        load.send(Ask(Work(number, 1)))
    await load.finish()
    return await stage.counted("gateway_backend_state", state="up") == len(stage.replicas.each)
