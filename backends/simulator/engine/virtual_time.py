"""Traces and closed loops played in virtual time, on one engine or on a fleet."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.drafting.script import Script
from backends.simulator.engine.engine import Engine, Step

if TYPE_CHECKING:  # importing the fleet loads a compiler, which a single engine does not need
    from backends.simulator.engine.fleet import Completion, Fleet

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened to each request, in order of arrival; all arrays have shape (requests,).

    Parameters
    ----------
    arrived_s
        Times of arrival, on the virtual clock.
    ttft_s, e2e_s
        Seconds from arrival to the first and to the last token.
    output_tokens
        Output tokens, int64.

    Examples
    --------
    >>> timeline = Timeline(np.array([0.0]), np.array([0.5]), np.array([2.5]), np.array([41]))
    >>> timeline.tpot_s, timeline.tokens_per_s
    (array([0.05]), 16.4)
    """

    arrived_s: Floats
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
    """A request of a trace without texts.

    Parameters
    ----------
    kind, temperature
        What the request's acceptance depends on.
    prefix_blocks
        As in `Script`.
    """

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    kind: str = "chat"
    temperature: float = 0.0
    prefix_blocks: tuple[int, ...] = ()


def run_virtual(engine: Engine, arrivals: Iterable[tuple[float, Script]]) -> Timeline:
    """Play requests that arrive at given times (an open loop) until all have ended.

    Parameters
    ----------
    engine
        An idle engine.
    arrivals
        Pairs of arrival time in seconds and script, in order of arrival; read as they are needed.

    Raises
    ------
    ValueError
        If arrivals are out of order, or the engine refuses a script.

    Examples
    --------
    >>> from backends.calibration.calibration import load_calibration
    >>> from backends.calibration.parameters import EngineParameters
    >>> from backends.drafting.script import plain_steps
    >>> from backends.speculation import Method
    >>> engine = Engine(EngineParameters.of(load_calibration("llama-3.1-8b-h100"), Method.BASELINE))
    >>> script = Script(100, 20, *plain_steps(20))
    >>> timeline = run_virtual(engine, [(0.0, script), (0.5, script)])
    >>> timeline.output_tokens
    array([20, 20])
    >>> bool(np.allclose(timeline.ttft_s[0], timeline.ttft_s[1]))
    True
    """
    log = _Log()
    coming = iter(arrivals)
    following = next(coming, None)
    now_s = 0.0 if following is None else following[0]
    while True:
        while following is not None and following[0] <= now_s:
            log.add_arrival(engine.submit(following[1], following[0]), following[0], following[1])
            earlier_s, following = following[0], next(coming, None)
            if following is not None and following[0] < earlier_s:
                raise ValueError(f"arrivals are out of order: {following[0]} s after {earlier_s} s")
        step = engine.step(now_s)
        if step is not None:
            now_s += step.duration_s
            log.add_step(step, now_s)
        elif following is not None:
            now_s = following[0]
        else:
            return log.timeline()


def run_closed_loop(engine: Engine, scripts: Iterable[Script], concurrency: int) -> Timeline:
    """Play requests of `concurrency` clients, each of which sends its next request when the last one has ended.

    Raises
    ------
    ValueError
        If `concurrency` is less than 1, or the engine refuses a script.
    """
    if concurrency < 1:
        raise ValueError(f"a closed loop needs at least one client, not {concurrency}")
    log = _Log()
    coming: Iterator[Script] = iter(scripts)
    now_s, idle = 0.0, concurrency
    while True:
        for script in (script for _, script in zip(range(idle), coming, strict=False)):
            log.add_arrival(engine.submit(script, now_s), now_s, script)
        step = engine.step(now_s)
        if step is None:
            return log.timeline()
        now_s += step.duration_s
        log.add_step(step, now_s)
        idle = int(step.finished.sum())


def run_fleet(
    fleet: Fleet,
    arrivals: Iterable[Arrival],
    choose: Callable[[Arrival], int],
    observe: Callable[[Completion], None] | None = None,
) -> Timeline:
    """Play a trace on a fleet until all requests have ended.

    Parameters
    ----------
    fleet
        A new, idle fleet, whose ids begin at 0.
    arrivals
        Requests in order of arrival; read as they are needed.
    choose
        Function that returns the index of the replica that serves a request. The fleet has advanced to the arrival
        when it is called.
    observe
        Called with each completion, before the next choice.

    Raises
    ------
    ValueError
        If arrivals are out of order, or the engine refuses a request.
    """
    arrived, first, last, tokens = array("d"), array("d"), array("d"), array("q")

    def record(completions: list[Completion]) -> None:
        for completion in completions:
            first[completion.request_id] = completion.first_s
            last[completion.request_id] = completion.ended_s
            if observe is not None:
                observe(completion)

    now_s = -math.inf
    for arrival in arrivals:
        if arrival.arrived_s < now_s:
            raise ValueError(f"arrivals are out of order: {arrival.arrived_s} s after {now_s} s")
        now_s = arrival.arrived_s
        record(fleet.advance(now_s))
        _, prompt_tokens, output_tokens, kind, temperature, blocks = arrival
        fleet.submit(
            choose(arrival),
            prompt_tokens,
            output_tokens,
            now_s,
            kind=kind,
            temperature=temperature,
            prefix_blocks=blocks,
        )
        arrived.append(now_s)
        first.append(math.nan)
        last.append(math.nan)
        tokens.append(output_tokens)
    record(fleet.advance(math.inf))
    start = np.array(arrived)
    return Timeline(start, np.array(first) - start, np.array(last) - start, np.array(tokens, np.int64))


class _Log:
    """Times of arrival, first token and last token of each request."""

    def __init__(self) -> None:
        self._ordinals: dict[int, int] = {}
        self._arrived: list[float] = []
        self._first: list[float] = []
        self._last: list[float] = []
        self._tokens: list[int] = []

    def add_arrival(self, request_id: int, now_s: float, script: Script) -> None:
        self._ordinals[request_id] = len(self._arrived)
        self._arrived.append(now_s)
        self._first.append(np.nan)
        self._last.append(np.nan)
        self._tokens.append(script.output_tokens)

    def add_step(self, step: Step, now_s: float) -> None:
        for request_id in step.request_ids[step.sent == step.tokens].tolist():
            self._first[self._ordinals[request_id]] = now_s
        for request_id in step.request_ids[step.finished].tolist():
            self._last[self._ordinals.pop(request_id)] = now_s

    def timeline(self) -> Timeline:
        arrived = np.array(self._arrived, np.float64)
        first, last = np.array(self._first, np.float64), np.array(self._last, np.float64)
        return Timeline(arrived, first - arrived, last - arrived, np.array(self._tokens, np.int64))
