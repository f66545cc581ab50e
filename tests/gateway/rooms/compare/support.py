"""What tests of comparisons share: a pool, how one is begun, and evidence as another gateway would have it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from gateway.rooms.compare import room
from gateway.rooms.compare.running import Running as Comparison
from policies.experiment.evidence import BLOCKS, Sums
from tests.gateway.conftest import ADMIN, MODEL, Running, start_gateway
from tests.support.waiting import eventually_async

METHODS = {"a0": "baseline", "a1": "baseline", "b0": "eagle3", "b1": "eagle3"}


def with_state(
    folder: Path, methods: dict[str, str] = METHODS, **settings: Any
) -> AbstractAsyncContextManager[Running]:
    """Start a gateway that keeps what was found."""
    return start_gateway(methods, state={"file": str(folder / "state.sqlite")}, **settings)


def teach(present: Comparison, **seconds: float) -> None:
    """Add blocks of time in which the arms took so many seconds per unit of work, as another gateway would."""
    rng = Random(1)
    for number in range(40):
        for at, arm in enumerate(present.definition.replicas):
            took = [*seconds.values()][at] * rng.uniform(0.95, 1.05)
            work = 5000.0 * rng.uniform(0.8, 1.2)
            sums = Sums(took * work, work, 50.0, work, 1.0, 50.0, 100.0, 5.0, 50.0, took * work, work, work)
            present._statistics.add(BLOCKS, (present.plan.id, str(number), arm, "other"), *sums)


def known(present: Comparison, number: int, arm: str, **sums: float) -> None:
    """Add what one arm came to in a block, as another gateway would."""
    present._statistics.add(BLOCKS, (present.plan.id, str(number), arm, "other"), *Sums(weight=1.0, **sums))


def room_of(gateway: Running) -> room.CompareRoom:
    (found,) = [each for each in gateway.gateway.rooms if isinstance(each, room.CompareRoom)]
    return found


def comparisons(gateway: Running) -> list[Comparison]:
    return [*room_of(gateway).comparisons.values()]


async def start(gateway: Running, **fields: Any) -> httpx.Response:
    asked = {"a": "baseline", "b": "eagle3", "block_s": 10, **fields}
    return await gateway.client.post("/admin/compare/start", json=asked, headers=ADMIN)


async def begin(gateway: Running, **fields: Any) -> Comparison:
    """Begin a comparison, and return it."""
    assert (await start(gateway, **fields)).status_code == 200
    (present,) = comparisons(gateway)
    return present


async def stop(gateway: Running) -> None:
    (await gateway.client.post("/admin/compare/stop", json={}, headers=ADMIN)).raise_for_status()


async def found(gateway: Running) -> dict[str, Any]:
    answer = (await gateway.admin("compare"))["models"]
    return answer[MODEL] if answer else {}


async def until_stage(gateway: Running, stage: str) -> None:
    """Wait until the comparison is at a stage."""

    async def is_there() -> bool:
        return bool((await found(gateway)).get("stage") == stage)

    await eventually_async(is_there)


def narrowing(gateway: Running) -> bool:
    return bool(gateway.gateway.relay.router._narrowing)
