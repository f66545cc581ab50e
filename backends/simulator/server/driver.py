"""An engine in real time: each step lasts as long as its model says, and its tokens are then delivered."""

from __future__ import annotations

import asyncio
import time

from backends.drafting.script import Script
from backends.simulator.engine.engine import Engine, Step
from backends.simulator.server.answer import Answer
from backends.simulator.server.metrics import Gauges, Tallies
from backends.simulator.server.playback import Play, TokenListener

_MAX_LAG_S = 0.25


class Driver:
    """Plays requests on an engine, on the running event loop.

    Steps are paced against absolute deadlines, so that a late wake-up does not delay the next one. Only if the process
    is more than a quarter of a second behind is the excess given up.

    Parameters
    ----------
    time_scale
        Real seconds per second of the engine; 0.1 plays ten times as fast.
    """

    def __init__(self, engine: Engine, tallies: Tallies, time_scale: float = 1.0) -> None:
        self.engine = engine
        self.tallies = tallies
        self._scale = time_scale
        self._origin_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._plays: dict[int, Play] = {}
        self._ids: dict[Play, int] = {}
        self._ends_s = 0.0  # end of the current step, on the engine's clock
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def gauges(self) -> Gauges:
        """Return the engine's current state."""
        engine = self.engine
        cache = (engine.counters.prefix_queries, engine.counters.prefix_hits)
        return Gauges(engine.running, engine.waiting, engine.kv_usage, *cache, engine.counters.preemptions)

    def play(self, index: int, answer: Answer, script: Script, listener: TokenListener) -> Play:
        """Submit an answer to the engine; it joins the next step that has room for it."""
        now_s = time.monotonic()
        play = Play(index, answer, script, listener, arrived_s=now_s)
        request = self.engine.submit(script, self._engine_time(now_s))
        self._plays[request] = play
        self._ids[play] = request
        if self._timer is None:
            # Start later in this turn of the loop, so that requests that arrive together share the step.
            self._ends_s = self._engine_time(now_s)
            self._timer = self._loop.call_soon(self._tick)
        return play

    def cancel(self, play: Play) -> None:
        """Remove an answer from the engine, if it is still there."""
        request = self._ids.pop(play, None)
        if request is not None:
            del self._plays[request]
            self.engine.cancel(request)
            self.tallies.finished["abort"] += 1

    def close(self) -> None:
        """Stop the engine."""
        if self._timer is not None:
            self._timer.cancel()

    def _engine_time(self, clock_s: float) -> float:
        return (clock_s - self._origin_s) / self._scale

    def _tick(self) -> None:
        now_s = time.monotonic()
        step, self._step = self._step, None
        try:
            if step is not None:
                self._deliver(step, now_s)
                due_s = self._origin_s + self._ends_s * self._scale
                self.tallies.step_lateness.observe(max(0.0, time.monotonic() - due_s))
        finally:  # an error in one client's answer must not stop the others
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        begins_s = max(self._ends_s, self._engine_time(now_s - _MAX_LAG_S))
        self._step = self.engine.step(begins_s)
        if self._step is None:
            self._timer = None
            return
        for admission in self._step.admitted:
            admitted = self._plays[admission.request_id]
            if not admitted.scheduled_s:  # else it was preempted and is admitted again
                admitted.scheduled_s = now_s
                admitted.cached_tokens = admission.cached_tokens
        self._ends_s = begins_s + self._step.duration_s
        delay_s = self._origin_s + self._ends_s * self._scale - time.monotonic()
        self._timer = self._loop.call_later(delay_s, self._tick) if delay_s > 0 else self._loop.call_soon(self._tick)

    def _deliver(self, step: Step, now_s: float) -> None:
        tallies = self.tallies
        generated = prefilled = 0
        for emission in step.emissions:
            play = self._plays.get(emission.request_id)
            if play is None:
                continue  # cancelled while the step ran
            start, end = play.sent, play.sent + emission.tokens
            generated += emission.tokens
            play.sent = end
            if start == 0:
                prefilled += len(play.answer.prompt_ids)
                play.first_s = now_s
                tallies.time_to_first_token.observe(now_s - play.arrived_s)
            else:
                tallies.inter_token_latency.observe(now_s - play.last_s)
                if emission.drafted:
                    play.drafted.append(emission.drafted)
                    play.accepted.append(emission.tokens - 1)
                    tallies.count_draft(emission.drafted, emission.tokens - 1)
            play.last_s = now_s
            if play.finished:
                del self._plays[self._ids.pop(play)]
                self._count(play)
            play.listener.on_tokens(play, start, end)
        tallies.prompt_tokens += prefilled
        tallies.generation_tokens += generated
        tallies.iteration_tokens.observe(prefilled + generated)

    def _count(self, play: Play) -> None:
        """Count a finished play."""
        tallies, answer = self.tallies, play.answer
        tallies.finished[answer.finish_reason] += 1
        tallies.request_prompt_tokens.observe(len(answer.prompt_ids))
        tallies.request_generation_tokens.observe(len(answer.ids))
        tallies.request_max_generation_tokens.observe(len(answer.ids))
        tallies.request_prefill_tokens.observe(len(answer.prompt_ids) - play.cached_tokens)
        tallies.e2e_latency.observe(play.last_s - play.arrived_s)
        tallies.queue_time.observe(max(0.0, play.scheduled_s - play.arrived_s))
        tallies.inference_time.observe(play.last_s - play.scheduled_s)
        tallies.prefill_time.observe(play.first_s - play.scheduled_s)
        tallies.decode_time.observe(play.last_s - play.first_s)
        if len(answer.ids) > 1:
            tallies.time_per_output_token.observe((play.last_s - play.first_s) / (len(answer.ids) - 1))
