"""Requests played in virtual time: by a policy on a pool, and by the clients of a closed loop on one replica."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.drafting.script import Script
from backends.simulator.engine.fleet import Completion, EngineStep, Fleet
from lab.simulation.simulate import outcome_of
from policies.features.request import RequestFeatures
from policies.policy import Decision, Policy
from policies.roles import Learner, Maintained

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
    def tokens_per_s(self) -> float:
        """Output tokens per second from the first arrival to the last token."""
        duration_s = float((self.arrived_s + self.e2e_s).max() - self.arrived_s.min())
        return float(self.output_tokens.sum() / duration_s)


@dataclass(frozen=True, slots=True)
class Call:
    """A request without a text: its arrival, and the length of its answer."""

    arrived_s: float
    features: RequestFeatures
    output_tokens: int


def play(
    policy: Policy, fleet: Fleet, calls: Sequence[Call], maintenance: int, routed: Sequence[int] | None = None
) -> tuple[Timeline, list[Decision]]:
    """Send calls by a policy until all have ended; return the course of each, and the decision for it.

    Parameters
    ----------
    maintenance
        Calls after which the policy is fitted.
    routed
        The replica of each call, of which the policy then has no choice.
    """
    log, pool, now_s = _Log(), fleet.replicas, 0.0
    index_of = {replica.name: index for index, replica in enumerate(pool)}
    decisions: list[Decision] = []
    if isinstance(policy, Maintained):
        policy.set_clock(lambda: now_s)

    def record(completions: list[Completion]) -> None:
        for done in completions:
            log.first_s[done.request_id], log.last_s[done.request_id] = done.first_s, done.ended_s
            if isinstance(policy, Learner):
                features, decision = calls[done.request_id].features, decisions[done.request_id]
                policy.observe(outcome_of(features, decision, done, pool[done.replica].method))

    for number, call in enumerate(calls):
        features = call.features
        log.add(call.arrived_s, call.output_tokens)
        record(fleet.advance(call.arrived_s))
        now_s = call.arrived_s
        if number % maintenance == 0:
            fit(policy)
        decisions.append(policy.choose(features, pool if routed is None else [pool[routed[number]]]))
        fleet.submit(
            index_of[decisions[-1].backend],
            features.prompt_tokens,
            call.output_tokens,
            now_s,
            kind=features.workload or "chat",
            temperature=features.temperature,
        )
    record(fleet.advance(math.inf))
    return log.timeline(), decisions


def fit(policy: Policy) -> None:
    """Run the maintenance of a policy, if it is due."""
    if isinstance(policy, Maintained) and (work := policy.maintenance()) is not None:
        work()


def run_closed_loop(fleet: Fleet, scripts: Iterable[Script], concurrency: int, turnaround_s: float = 0.0) -> Timeline:
    """Play requests of `concurrency` clients on one replica; each sends its next `turnaround_s` after an answer."""
    outside_s = fleet.replicas[0].parameters.outside_s
    log, coming = _Log(), iter(scripts)
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
        now_s += step.duration_s
        log.add_step(step, now_s + outside_s)
        due_s += [now_s + outside_s + turnaround_s] * sum(not emission.left for emission in step.emissions)


class _Log:
    """Times of arrival, first token and last token of each request, by id."""

    def __init__(self) -> None:
        self.first_s, self.last_s = array("d"), array("d")
        self._arrived_s, self._tokens = array("d"), array("q")

    def add(self, arrived_s: float, output_tokens: int) -> None:
        """Add a request."""
        self._arrived_s.append(arrived_s)
        self._tokens.append(output_tokens)
        self.first_s.append(math.nan)
        self.last_s.append(math.nan)

    def add_step(self, step: EngineStep, seen_s: float) -> None:
        """Add a step whose tokens are seen at a time."""
        for request_id, tokens, _, sent, left in step.emissions:
            if sent == tokens:
                self.first_s[request_id] = seen_s
            if not left:
                self.last_s[request_id] = seen_s

    def timeline(self) -> Timeline:
        arrived_s = np.array(self._arrived_s)
        first_s, last_s = np.array(self.first_s), np.array(self.last_s)
        return Timeline(arrived_s, first_s - arrived_s, last_s - arrived_s, np.array(self._tokens, np.int64))
