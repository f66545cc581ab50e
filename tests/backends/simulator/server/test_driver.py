"""Steps end when the engine says, without drift, and tokens are handed out at that moment."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from backends.calibration.calibration import Drafting, Kind, StepTime
from backends.calibration.parameters import EngineParameters
from backends.drafting.script import Script
from backends.simulator.engine.engine import Engine
from backends.simulator.server.answer import Answer
from backends.simulator.server.driver import Driver
from backends.simulator.server.metrics import Tallies
from backends.simulator.server.playback import Play, Usage, request_metrics

STEP_S = 0.01


def driver(*, time_scale: float = 1.0, max_num_seqs: int = 8, k: int = 0) -> Driver:
    step = StepTime(
        source="made up",
        base_s=STEP_S,
        knee_tokens=0,
        per_token_below_knee_s=0,
        per_token_above_knee_s=0,
        per_context_token_s=0,
        overhead_s=0,
    )
    parameters = EngineParameters(step, Drafting(source="made up"), k=k, max_num_seqs=max_num_seqs)
    return Driver(Engine(parameters), Tallies(8192, accepted_at=[0] * k), time_scale)


class Listener:
    """Notes when which tokens came, and is done after the last."""

    def __init__(self, *, fails: bool = False) -> None:
        self.heard: list[tuple[float, int, int]] = []
        self.done = asyncio.Event()
        self._fails = fails

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        if self._fails:
            raise RuntimeError("a broken audience")
        self.heard.append((time.monotonic(), start, end))
        if play.finished:
            self.done.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self.done.wait(), 20)


def begin(each: Driver, listener: Listener, tokens: int, step_tokens: int = 1, index: int = 0) -> Play:
    """Play an answer of which every step after the first emits `step_tokens`."""
    emitted = np.minimum(step_tokens, tokens - np.arange(tokens)).astype(np.int32)
    emitted[0] = 1
    drafted = np.full(tokens, step_tokens - 1, np.int32)
    drafted[0] = 0
    answer = Answer(
        [1] * 20, [5] * tokens, "x" * tokens, list(range(1, tokens + 1)), [0.9] * tokens, Kind.CHAT, "length"
    )
    return each.play(index, answer, Script(20, tokens, emitted, drafted), listener)


async def test_steps_do_not_drift() -> None:
    each, listener = driver(), Listener()
    began_s = time.monotonic()
    begin(each, listener, 60)
    await listener.wait()
    late_s = [at - began_s - STEP_S * (index + 1) for index, (at, _, _) in enumerate(listener.heard)]
    assert [(start, end) for _, start, end in listener.heard] == [(index, index + 1) for index in range(60)]
    assert min(late_s) > -0.002
    assert float(np.median(late_s[-20:])) < 0.005, "a late step must not delay those after it"


async def test_time_can_be_scaled() -> None:
    each, listener = driver(time_scale=0.1), Listener()
    began_s = time.monotonic()
    begin(each, listener, 100)
    await listener.wait()
    assert 0.09 < time.monotonic() - began_s < 0.5


async def test_a_step_may_bring_several_tokens() -> None:
    each, listener = driver(k=3), Listener()
    play = begin(each, listener, 10, step_tokens=4)
    await listener.wait()
    assert [(start, end) for _, start, end in listener.heard] == [(0, 1), (1, 5), (5, 9), (9, 10)]
    metrics = request_metrics([play], 3)
    assert metrics is not None
    speculation = metrics["speculative_decoding"]
    assert speculation["per_step_accepted"] == [3, 3, 0]
    assert speculation["acceptance_histogram"] == [1, 0, 0, 2]
    assert speculation["mean_acceptance_length"] == pytest.approx(3.0)
    assert each.tallies.accepted_at == [2, 2, 2]
    assert metrics["generation_time_ms"] == pytest.approx(3 * STEP_S * 1e3, rel=0.5)


async def test_arrivals_join_the_next_step() -> None:
    each, first, second = driver(), Listener(), Listener()
    begin(each, first, 30)
    while len(first.heard) < 5:
        await asyncio.sleep(STEP_S / 5)
    begin(each, second, 5)
    assert (each.gauges().running, each.gauges().waiting) == (1, 1)
    await asyncio.gather(first.wait(), second.wait())
    together_s = {round(at, 3) for at, _, _ in second.heard}
    apart_s = [min(abs(at - other) for other, _, _ in first.heard) for at in together_s]
    assert max(apart_s) < 0.002, "one step brings both their tokens"
    assert len(first.heard) == 30


async def test_those_without_room_wait() -> None:
    each, first, second = driver(max_num_seqs=1), Listener(), Listener()
    begin(each, first, 5)
    play = begin(each, second, 5)
    await asyncio.gather(first.wait(), second.wait())
    assert second.heard[0][0] > first.heard[-1][0]
    metrics = request_metrics([play], 0)
    assert metrics is not None
    assert metrics["queue_time_ms"] == pytest.approx(5 * STEP_S * 1e3, rel=0.3)
    assert metrics["time_to_first_token_ms"] > metrics["queue_time_ms"]


async def test_what_is_cancelled_is_heard_no_more() -> None:
    each, listener, other = driver(), Listener(), Listener()
    play = begin(each, listener, 1000)
    begin(each, other, 20)
    while len(listener.heard) < 3:
        await asyncio.sleep(STEP_S / 5)
    each.cancel(play)
    each.cancel(play)
    count = len(listener.heard)
    assert each.gauges().running == 1
    await other.wait()
    assert len(listener.heard) == count
    assert each.tallies.finished["abort"] == 1


async def test_an_idle_engine_wakes() -> None:
    each = driver(time_scale=0.1)
    for _ in range(3):
        listener = Listener()
        began_s = time.monotonic()
        begin(each, listener, 5)
        await listener.wait()
        assert time.monotonic() - began_s < 0.2
        await asyncio.sleep(0.02)
        assert each.gauges().running == 0


async def test_a_broken_audience_does_not_stop_the_others() -> None:
    each, listener = driver(), Listener()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["exception"]))
    begin(each, listener, 5)
    begin(each, Listener(fails=True), 2)
    await listener.wait()
    assert [str(each) for each in complaints] == ["a broken audience"] * 2


async def test_a_prompt_with_several_choices_counts_once() -> None:
    each, listeners = driver(time_scale=0.1), [Listener(), Listener()]
    prompt = [1] * 40
    answers = [Answer(prompt, [5, 6], "xy", [1, 2], [0.9, 0.9], Kind.CHAT, "length") for _ in listeners]
    plain = (np.ones(2, np.int32), np.zeros(2, np.int32))
    plays = [
        each.play(index, answer, Script(40, 2, *plain), listener)
        for index, (answer, listener) in enumerate(zip(answers, listeners, strict=True))
    ]
    await asyncio.gather(*(listener.wait() for listener in listeners))
    usage = Usage.of(plays, tells_created=True)
    assert (usage.prompt, usage.completion, usage.created_cache) == (40, 4, 32)
    assert request_metrics(plays, 0) is None
