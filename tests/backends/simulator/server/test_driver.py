"""Steps last as long as the engine says, without drift, and their tokens are delivered at their end."""

from __future__ import annotations

import asyncio
import time

import pytest

from backends.calibration.calibration import Drafting, Kind, StepTime
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.simulator.engine.replica import SimulatedReplica
from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.driver import Driver, Emitted, Play
from backends.simulator.server.metrics import Tallies
from backends.speculation import Method
from tests.backends.simulator.engine.fleets import steady
from tests.support.step_time import STEP
from tests.support.waiting import eventually

STEP_S = 0.01


def driver(k: int = 0) -> Driver:
    nothing = {name: 0.0 for name in StepTime.model_fields if name.endswith("_s")}
    step = STEP.model_copy(update=nothing | {"base_s": STEP_S})
    parameters = EngineParameters(step, Drafting(source="made up"), k=k)
    replica = SimulatedReplica("a", load_calibration("llama-3.1-8b-h100"), Method.BASELINE, parameters=parameters)
    return Driver(replica, Tallies("m"), 1.0)


class Listener:
    """Records the times and ranges of its tokens."""

    def __init__(self) -> None:
        self.received: list[tuple[float, int, int]] = []
        self.done = asyncio.Event()

    def __call__(self, emitted: Emitted) -> None:
        self.received.append((time.monotonic(), emitted.start, emitted.end))
        if emitted.is_last:
            self.done.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self.done.wait(), 20)


def play_tokens(each: Driver, listener: Listener, tokens: int, step_tokens: int = 1) -> Play:
    """Play an answer of which every step after the first emits `step_tokens`."""
    answer = ComposedAnswer([1] * 20, [5] * tokens, "x" * tokens, list(range(1, tokens + 1)), Kind.CHAT, "length")
    return each.play(0, answer, steady(20, tokens, step_tokens - 1, step_tokens), listener)


@pytest.mark.slow
async def test_steps_do_not_drift() -> None:
    each, listener = driver(), Listener()
    began_s = time.monotonic()
    play_tokens(each, listener, 60)
    await listener.wait()
    late_s = [at - began_s - STEP_S * (index + 1) for index, (at, _, _) in enumerate(listener.received)]
    assert [(start, end) for _, start, end in listener.received] == [(index, index + 1) for index in range(60)]
    assert min(late_s) > -0.002
    assert min(late_s[-20:]) < 0.005, "a late step must not delay those after it"


async def test_a_step_can_emit_several_tokens() -> None:
    each, listener = driver(k=3), Listener()
    play = play_tokens(each, listener, 10, step_tokens=4)
    await listener.wait()
    assert [(start, end) for _, start, end in listener.received] == [(0, 1), (1, 5), (5, 9), (9, 10)]
    assert (play.drafted, play.accepted) == ([3, 3, 3], [3, 3, 0])
    assert each.counters().accepted_at.tolist() == [2, 2, 2]


async def test_a_cancelled_request_emits_no_more_tokens() -> None:
    each, listener, other = driver(), Listener(), Listener()
    play = play_tokens(each, listener, 1000)
    play_tokens(each, other, 20)
    await eventually(lambda: len(listener.received) >= 3)
    each.cancel(play)
    each.cancel(play)
    count = len(listener.received)
    assert each.load().running == 1
    await other.wait()
    assert len(listener.received) == count
