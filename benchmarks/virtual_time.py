"""Traces and closed loops played in virtual time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.drafting.script import Script
from backends.simulator.engine.fleet import Completion, EngineStep, Fleet

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened to each request, in order of arrival; all arrays have shape (requests,).

    Examples
    --------
    >>> timeline = Timeline(np.array([0.0]), np.array([0.5]), np.array([2.5]), np.array([41]))
    >>> timeline.tpot_s, timeline.tokens_per_s
    (array([0.05]), 16.4)
    """

    arrived_s: Floats  # times of arrival, on the virtual clock
    # ttft_s, e2e_s: seconds from arrival to the first and to the last token.
    ttft_s: Floats
    e2e_s: Floats
    output_tokens: npt.NDArray[np.int64]

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first."""
        later = self.output_tokens - 1
        return np.where(later > 0, (self.e2e_s - self.ttft_s) / np.maximum(later, 1), np.nan)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float((self.arrived_s + self.e2e_s).max() - self.arrived_s.min()) if len(self.arrived_s) else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the whole duration."""
        return float(self.output_tokens.sum() / self.duration_s) if len(self.arrived_s) else 0.0


class Arrival(NamedTuple):
    """A request of a trace without texts."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    # kind, temperature: what the request's acceptance depends on.
    kind: str = "chat"
    temperature: float = 0.0
    prefix_blocks: tuple[int, ...] = ()  # as in `Script`


def run_virtual(
    fleet: Fleet, arrivals: Iterable[tuple[float, Script]], observe: Callable[[EngineStep], None] | None = None
) -> Timeline:
    """Play requests that arrive at given times (an open loop) on one replica until all have ended.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> from backends.drafting.script import plain_steps
    >>> from backends.simulator.engine.fleet import SimulatedReplica
    >>> from backends.speculation import Method
    >>> fleet = Fleet([SimulatedReplica("a", load_calibration("llama-3.1-8b-h100"), Method.BASELINE)])
    >>> script = Script(100, 20, *plain_steps(20))
    >>> timeline = run_virtual(fleet, [(0.0, script), (0.5, script)])
    >>> timeline.output_tokens
    array([20, 20])
    >>> bool(np.allclose(timeline.ttft_s[0], timeline.ttft_s[1]))
    True
    """
    log = _Log(fleet.replicas[0].parameters.outside_s)
    coming = iter(arrivals)
    following = next(coming, None)
    now_s = 0.0 if following is None else following[0]
    while True:
        while following is not None and following[0] <= now_s:
            arrived_s, script = following
            log.add(arrived_s, script.output_tokens)
            fleet.submit_script(0, script, arrived_s)
            following = next(coming, None)
        step = fleet.step(now_s)
        if step is not None:
            now_s = log.add_step(step, now_s)
            if observe is not None:
                observe(step)
        elif following is not None:
            now_s = following[0]
        else:
            return log.timeline()


def run_closed_loop(
    fleet: Fleet,
    scripts: Iterable[Script],
    concurrency: int,
    observe: Callable[[EngineStep], None] | None = None,
    turnaround_s: float = 0.0,
) -> Timeline:
    """Play requests of `concurrency` clients on one replica; each sends its next `turnaround_s` after an answer."""
    if concurrency < 1:
        raise ValueError(f"a closed loop needs at least one client, not {concurrency}")
    outside_s = fleet.replicas[0].parameters.outside_s
    log, coming = _Log(outside_s), iter(scripts)
    now_s, due_s = 0.0, [0.0] * concurrency
    while True:
        while due_s and due_s[0] <= now_s and (script := next(coming, None)) is not None:
            arrived_s = due_s.pop(0)
            log.add(arrived_s, script.output_tokens)
            fleet.submit_script(0, script, arrived_s)
        step = fleet.step(now_s)
        if step is None:
            if not due_s or due_s[0] <= now_s:
                return log.timeline()
            now_s = due_s[0]
            continue
        now_s = log.add_step(step, now_s)
        due_s += [now_s + outside_s + turnaround_s] * sum(not emission.left for emission in step.emissions)
        if observe is not None:
            observe(step)


def run_fleet(
    fleet: Fleet,
    arrivals: Iterable[Arrival],
    choose: Callable[[Arrival], int],
    observe: Callable[[Completion], None] | None = None,
) -> Timeline:
    """Play a trace on a fleet until all requests have ended."""
    log = _Log()

    def record(completions: list[Completion]) -> None:
        for completion in completions:
            log.first_s[completion.request_id] = completion.first_s
            log.last_s[completion.request_id] = completion.ended_s
            if observe is not None:
                observe(completion)

    for arrival in arrivals:
        arrived_s, prompt_tokens, output_tokens, kind, temperature, blocks = arrival
        log.add(arrived_s, output_tokens)
        record(fleet.advance(arrived_s))
        fleet.submit(
            choose(arrival),
            prompt_tokens,
            output_tokens,
            arrived_s,
            kind=kind,
            temperature=temperature,
            prefix_blocks=blocks,
        )
    record(fleet.advance(math.inf))
    return log.timeline()


class _Log:
    """Times of arrival, first token and last token of each request, by id."""

    def __init__(self, outside_s: float = 0.0) -> None:
        self._outside_s = outside_s  # what `Completion` has, and steps have not
        self.first_s, self.last_s = array("d"), array("d")
        self._arrived_s, self._tokens = array("d"), array("q")

    def add(self, arrived_s: float, output_tokens: int) -> None:
        """Add a request."""
        if self._arrived_s and arrived_s < self._arrived_s[-1]:
            raise ValueError(f"arrivals are out of order: {arrived_s} s after {self._arrived_s[-1]} s")
        self._arrived_s.append(arrived_s)
        self._tokens.append(output_tokens)
        self.first_s.append(math.nan)
        self.last_s.append(math.nan)

    def add_step(self, step: EngineStep, now_s: float) -> float:
        """Add a step that begins now, and return its end."""
        ends_s = now_s + step.duration_s
        for request_id, tokens, _, sent, left in step.emissions:
            if sent == tokens:
                self.first_s[request_id] = ends_s + self._outside_s
            if not left:
                self.last_s[request_id] = ends_s + self._outside_s
        return ends_s

    def timeline(self) -> Timeline:
        arrived_s = np.array(self._arrived_s)
        first_s, last_s = np.array(self.first_s), np.array(self.last_s)
        return Timeline(arrived_s, first_s - arrived_s, last_s - arrived_s, np.array(self._tokens, np.int64))
