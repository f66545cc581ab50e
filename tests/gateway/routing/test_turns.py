"""Long work in steps: one step in each turn of the event loop, from each client in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

from gateway.routing.large_bodies import Turns
from tests.support.waiting import eventually


async def test_others_have_their_turn_between_steps_and_as_much_time_as_a_long_one_took() -> None:
    turns, log = Turns(), list[tuple[str, float]]()

    def steps(name: str, count: int, each_s: float) -> Iterator[None]:
        for _ in range(count):
            end_s = time.perf_counter() + each_s
            while time.perf_counter() < end_s:
                pass
            log.append((name, time.perf_counter()))
            yield

    for name in ("a", "a", "b"):
        turns.add(name, steps(name, 2, 0.02))
    assert log == [], "not in the call that adds"
    await eventually(lambda: len(log) == 6)
    assert [name for name, _ in log] == ["a", "b", "a", "b", "a", "a"]
    gaps_s = [later - earlier for (_, earlier), (_, later) in pairwise(log)]
    assert min(gaps_s) >= 2 * 0.02


async def test_short_steps_take_a_turn_each_without_a_pause() -> None:
    turns, taken = Turns(), 0

    def steps() -> Iterator[None]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield

    turns.add("a", steps())
    seen = []
    while taken < 100:
        seen.append(taken)
        await asyncio.sleep(0)
    assert len(seen) >= 100
    await eventually(lambda: not turns._waiting)
    turns.add("a", steps())
    await eventually(lambda: taken == 200)
