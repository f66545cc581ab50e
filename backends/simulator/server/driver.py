"""An engine in real time: each step lasts as long as its model says, and its tokens are then delivered."""

from __future__ import annotations

import asyncio
import time

from backends.backend import EngineLoad
from backends.drafting.script import Script
from backends.simulator.engine.fleet import Counters, Fleet, Replica, Step, load_rules
from backends.simulator.server.answer import Answer
from backends.simulator.server.metrics import Tallies
from backends.simulator.server.playback import Play, TokenListener

_MAX_LAG_S = 0.25


class Driver:
    """Plays requests on a fleet of one, on the running event loop.

    Steps are paced against absolute deadlines, so that a late wake-up does not delay the next one. Only if the process
    is more than a quarter of a second behind is the excess given up.
    """

    def __init__(self, replica: Replica, tallies: Tallies, time_scale: float = 1.0) -> None:
        load_rules(replica)
        self.tallies = tallies
        self._replica = replica  # idle replica that belongs to no fleet
        self._fleet = Fleet([replica])
        self._scale = time_scale
        self._origin_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._plays: dict[int, Play] = {}
        self._ids: dict[Play, int] = {}
        self._ends_s = 0.0  # end of the current step, on the engine's clock
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def load(self) -> EngineLoad:
        """Return the engine's current load."""
        return self._replica.report(time.monotonic())

    def counters(self) -> Counters:
        """Return the engine's counters."""
        return self._fleet.counters()

    def play(
        self, index: int, answer: Answer, script: Script, listener: TokenListener, temperature: float = 0.0
    ) -> Play:
        """Submit an answer to the engine; it joins the next step that has room for it."""
        now_s = time.monotonic()
        play = Play(index, answer, script, listener, arrived_s=now_s)
        arrived_s = self._engine_time(now_s)
        request = self._fleet.submit_script(0, script, arrived_s, kind=answer.kind, temperature=temperature)
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
            self._fleet.cancel(request)
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
        self._step = self._fleet.step(begins_s)
        if self._step is None:
            self._timer = None
            return
        for request_id, cached_tokens in self._step.admitted:
            admitted = self._plays[request_id]
            if not admitted.scheduled_s:  # else it was preempted and is admitted again
                admitted.scheduled_s = now_s
                admitted.cached_tokens = cached_tokens
        self._ends_s = begins_s + self._step.duration_s
        delay_s = self._origin_s + self._ends_s * self._scale - time.monotonic()
        self._timer = self._loop.call_later(delay_s, self._tick) if delay_s > 0 else self._loop.call_soon(self._tick)

    def _deliver(self, step: Step, now_s: float) -> None:
        tallies = self.tallies
        generated = prefilled = 0
        for request_id, tokens, drafted, end, _left in step.emissions:
            play = self._plays.get(request_id)
            if play is None:
                continue  # cancelled while the step ran
            start = play.sent
            generated += tokens
            play.sent = end
            if start == 0:
                prefilled += len(play.answer.prompt_ids)
                play.first_s = now_s
                tallies.time_to_first_token.observe(now_s - play.arrived_s)
            else:
                tallies.inter_token_latency.observe(now_s - play.last_s)
                if drafted:
                    play.drafted.append(drafted)
                    play.accepted.append(tokens - 1)
            play.last_s = now_s
            if play.finished:
                del self._plays[self._ids.pop(play)]
                self._count(play)
            play.listener.on_tokens(play, start, end)
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
