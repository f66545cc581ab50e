"""An engine in real time: each step lasts as long as the model says, then delivers its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.backend import EngineLoad
from backends.drafting.script import Script
from backends.simulator.engine.fleet import Counters, EngineStep, Fleet, SimulatedReplica, load_rules
from backends.simulator.engine.state import UNCUT
from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.metrics import Tallies

_MAX_LAG_S = 0.25


@dataclass(slots=True, eq=False)
class Play:
    """An answer that the engine plays. Times are seconds on the clock of `time.monotonic`; 0.0: not yet."""

    index: int  # index of the choice in the response
    answer: ComposedAnswer
    emit: Callable[[Emitted], object]  # called with the tokens of each step
    arrived_s: float
    scheduled_s: float = 0.0  # when it joined the batch
    first_s: float = 0.0  # when its first token was emitted
    last_s: float = 0.0  # when its latest token was emitted
    sent: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    drafted: list[int] = field(default_factory=list)  # draft tokens of each step that has any
    accepted: list[int] = field(default_factory=list)  # how many of them were accepted


class Emitted(NamedTuple):
    """An answer's output tokens from `start` to `end`, emitted by one step."""

    play: Play
    start: int
    end: int

    @property
    def text(self) -> str:
        """Their text; see `ComposedAnswer.shown`."""
        return self.play.answer.shown(self.start, self.end)

    @property
    def is_last(self) -> bool:
        """Whether the answer ends with them."""
        return self.end == len(self.play.answer.ids)


class Driver:
    """Plays requests on a fleet of one, on the running event loop.

    Absolute deadlines pace the steps, so that a late wake-up does not delay the next one. If the process falls more
    than a quarter of a second behind, the driver gives up the excess.
    """

    def __init__(self, replica: SimulatedReplica, tallies: Tallies, time_scale: float = 1.0) -> None:
        load_rules(replica)
        self.tallies = tallies
        self._replica = replica  # idle, and in no fleet
        self._fleet = Fleet([replica])
        self._scale = time_scale
        self._origin_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._plays: dict[int, Play] = {}
        self._ids: dict[Play, int] = {}
        self._ends_s = 0.0  # end of the current step, on the engine's clock
        self._step: EngineStep | None = None
        self._counters = self._fleet.counters()
        self._is_running = False

    def load(self) -> EngineLoad:
        """Return the engine's current load."""
        return self._replica.report(time.monotonic())

    def counters(self) -> Counters:
        """Return the engine's counters over the steps that have ended."""
        return self._counters

    def play(
        self,
        index: int,
        answer: ComposedAnswer,
        script: Script,
        emit: Callable[[Emitted], object],
        temperature: float = 0.0,
        priority: int = 0,
        depth: int = UNCUT,
    ) -> Play:
        """Submit an answer to the engine; it joins the next step that has room for it."""
        now_s = time.monotonic()
        play = Play(index, answer, emit, arrived_s=now_s)
        arrived_s = self._engine_time(now_s)
        request = self._fleet.submit_script(
            0, script, arrived_s, kind=answer.kind, temperature=temperature, priority=priority, depth=depth
        )
        self._plays[request] = play
        self._ids[play] = request
        if not self._is_running:
            # Start later in this turn of the loop, so that requests arriving together share the step.
            self._is_running = True
            self._ends_s = self._engine_time(now_s)
            self._loop.call_soon(self._tick)
        return play

    def cancel(self, play: Play) -> None:
        """Remove an answer from the engine if it is still there."""
        request = self._ids.pop(play, None)
        if request is not None:
            del self._plays[request]
            self._fleet.cancel(request)
            self.tallies.finished["abort"].inc()

    def _engine_time(self, clock_s: float) -> float:
        return (clock_s - self._origin_s) / self._scale

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._step is not None:
            self._deliver(self._step, now_s)
        self._counters = self._fleet.counters()  # before the engine counts the step about to begin
        begins_s = max(self._ends_s, self._engine_time(now_s - _MAX_LAG_S))
        self._step = self._fleet.step(begins_s)
        if self._step is None:
            self._is_running = False
            return
        for request_id, cached_tokens in self._step.admitted:
            admitted = self._plays[request_id]
            if not admitted.scheduled_s:  # else it returns from preemption
                admitted.scheduled_s = now_s
                admitted.cached_tokens = cached_tokens
        self._ends_s = begins_s + self._step.duration_s
        delay_s = self._origin_s + self._ends_s * self._scale - time.monotonic()
        self._loop.call_later(max(0.0, delay_s), self._tick)

    def _deliver(self, step: EngineStep, now_s: float) -> None:
        tallies = self.tallies
        for request_id, tokens, drafted, end, _left in step.emissions:
            play = self._plays.get(request_id)
            if play is None:
                continue  # cancelled during the step
            start = play.sent
            play.sent = end
            if start == 0:
                play.first_s = now_s
                tallies.time_to_first_token.observe(now_s - play.arrived_s)
            else:
                tallies.inter_token_latency.observe(now_s - play.last_s)
                if drafted:
                    play.drafted.append(drafted)
                    play.accepted.append(tokens - 1)
            play.last_s = now_s
            emitted = Emitted(play, start, end)
            if emitted.is_last:
                del self._plays[self._ids.pop(play)]
                tallies.finished["length" if play.answer.finish_reason == "length" else "stop"].inc()
                tallies.e2e_latency.observe(now_s - play.arrived_s)
            play.emit(emitted)


class Generation:
    """The answers to a request while the engine plays them."""

    def __init__(
        self,
        driver: Driver,
        answers: Sequence[ComposedAnswer],
        scripts: Sequence[Script],
        temperature: float,
        priority: int,
        depth: int,
    ) -> None:
        self._driver = driver
        self._emitted: asyncio.Queue[Emitted] = asyncio.Queue()
        self.plays = [
            driver.play(index, answer, script, self._emitted.put_nowait, temperature, priority, depth)
            for index, (answer, script) in enumerate(zip(answers, scripts, strict=True))
        ]

    async def steps(self) -> AsyncIterator[Emitted]:
        """Yield what the engine emits until all answers are complete."""
        missing = len(self.plays)
        while missing:
            emitted = await self._emitted.get()
            missing -= emitted.is_last
            yield emitted

    def cancel(self) -> None:
        """Remove unfinished answers from the engine."""
        for play in self.plays:
            self._driver.cancel(play)
