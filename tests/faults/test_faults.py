"""Faults of replicas, of the gateway and of its disk, under load: each request is answered in full, or fails aloud."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from benchmarks.faults.injections import INJECTIONS
from benchmarks.faults.load import CUT, REFUSED, SILENT, UNANSWERED, Ask, Load, Tally, mixed
from benchmarks.faults.stage import Stage
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

OF_ONE_REPLICA = ("kill", "reset-middle", "503", "huge-lines")
"""`python -m benchmarks.faults` has more, which the tests of the relay have too."""
_seeds = count(1)


def some(number: int) -> Iterator[Ask]:
    """Yield requests of all kinds but the longest."""
    return islice((ask for ask in mixed(next(_seeds)) if ask.work.tokens < 100), number)


async def send(load: Load, number: int, rate_per_s: float = 100.0) -> None:
    """Send requests at a rate, and return once the last was sent."""
    await load.send_all(some(number), rate_per_s)


def nothing_is_lost_silently(stage: Stage, tally: Tally) -> None:
    """Check that no answer is incomplete or another's, and that nothing was run twice."""
    assert [outcome for outcome in tally.outcomes if outcome.what in SILENT] == []
    ids = {outcome.ask.work.request_id for outcome in tally.outcomes}
    assert ids.isdisjoint(stage.replicas.journal().run_twice())


async def refused_retries(stage: Stage) -> float:
    """Return how many requests were not sent to another replica, because the tests before have spent the budget."""
    return await stage.counted("gateway_retries_refused_total")


@pytest.mark.parametrize("fault", OF_ONE_REPLICA)
async def test_what_one_replica_does_is_lost_on_no_client(stage: Stage, fault: str) -> None:
    before, load = await refused_retries(stage), Load(stage.port)
    await send(load, 20)
    async with INJECTIONS[fault].inject(stage):
        await send(load, 40, 40.0 if fault == "503" else 100.0)  # it draws most requests, since it never has any
        tally = await load.finish()
    nothing_is_lost_silently(stage, tally)
    failed = [outcome for outcome in tally.outcomes if outcome.failed]
    assert len(failed) <= await refused_retries(stage) - before, tally.examples()


async def test_the_gateway_counts_what_its_clients_count(stage: Stage) -> None:
    before, load = await stage.counted("gateway_requests_total"), Load(stage.port)
    async with INJECTIONS["reset-middle"].inject(stage):
        await send(load, 60)
        tally = await load.finish()
    assert await stage.until_idle(30.0) is not None
    assert await stage.counted("gateway_requests_total") - before == len(tally.outcomes) == 60


async def test_a_killed_gateway_leaves_no_work_behind(stage: Stage) -> None:
    load = Load(stage.port)
    await send(load, 40)
    await stage.kill()
    await eventually_async(lambda: _idle(stage), what="replicas have given up what nobody waits for")
    await stage.start()
    await send(load, 20)
    tally = await load.finish()
    nothing_is_lost_silently(stage, tally)
    assert set(tally.failures()) <= {REFUSED, UNANSWERED, CUT}
    assert not any(outcome.failed for outcome in tally.outcomes[-10:])


async def _idle(stage: Stage) -> bool:
    return await stage.replicas.running() == 0
