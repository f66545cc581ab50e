"""Decides whether a replica may get requests: a pure function of its known health and of new evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from backends.engine_metrics import EngineMetrics


class State(StrEnum):
    """Whether a backend may get requests."""

    STARTING = "starting"  # no successful probe yet
    UP = "up"
    DOWN = "down"  # refuses, hangs or fails its health check
    EJECTED = "ejected"  # passes its health check, but fails requests that others serve; used again after a pause
    RECOVERING = "recovering"  # back from either: gets a request on trial, then a growing share
    DRAINING = "draining"  # taken out of service by an operator; requests in flight may finish


SERVING: Final = frozenset({State.UP, State.RECOVERING})
_MAX_TRIAL_S: Final = 60.0
"""Seconds without a request to send on trial, after which the replica returns without a trial."""
_SLOWEST_PROMPT_TOKENS_PER_S: Final = 2000.0
"""Speed of an engine that computes a long prompt in one step, and shows no progress meanwhile."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a replica leaves service, and when it returns."""

    # interval_s, timeout_s: seconds between two probes of a replica, and until a probe times out.
    interval_s: float = 2.0
    timeout_s: float = 2.0
    # Consecutive probes that must fail or time out before a replica counts as down. A refused connection needs no
    # second probe: nothing listens there.
    failures: int = 2
    # eject_s, eject_max_s: seconds of the first and of the longest ejection. A replica ejected again within
    # `eject_max_s` of its return stays out twice as long.
    eject_s: float = 2.0
    eject_max_s: float = 60.0
    # Seconds until a returning replica may have as many requests as the others. One that was down starts slowly only if
    # another has been up for as long; else all have just started.
    slow_start_s: float = 10.0
    # Different requests in a row that must fail by the replica's fault to eject it; while it recovers, one is enough.
    strikes: int = 3
    # Seconds without a new token or a change of the KV cache after which a replica with requests is down, even if it
    # answers probes and reports no requests.
    stall_s: float = 30.0

    @property
    def silence_s(self) -> float:
        """Seconds without any part of an answer that count as evidence, so that a probe can follow within `stall_s`."""
        return max(self.stall_s / 2.0, self.stall_s - self.interval_s)


@dataclass(frozen=True, slots=True)
class Health:
    """What is known about a replica's health; times are on the clock of `time.monotonic`."""

    state: State = State.STARTING
    reason: str = "not yet checked"
    is_drained: bool = False
    failed_probes: int = 0  # in a row
    strikes: frozenset[int] = frozenset()  # ids of the failed requests, each counted once
    ejection_s: float = 0.0  # length of the last ejection
    ejected_until_s: float = -math.inf
    up_since_s: float = math.inf  # unknown if it was up from the start
    returning_since_s: float = 0.0  # start of its last return: of its trial, then of its slow start
    is_on_trial: bool = False  # while it recovers: whether it has yet to serve a request
    # Tokens of prompts and answers, and KV usage; no engine reports -1. Last: when any part of an answer was read.
    progress: tuple[int, int, float, float] = (-1, -1, -1.0, 0.0)
    moved_at_s: float = 0.0  # when that last changed
    progress_at_s: float = 0.0  # the same, or when the engine last reported no requests
    has_stalled: bool = False  # since it was last up


class Others(NamedTuple):
    """What a judgment needs besides the replica's own health."""

    up: int  # other replicas of its model that are up
    longest_up_s: float = 0.0  # how long the longest of them has been up
    trials: int = 0  # the replica's own requests on trial


class Books(NamedTuple):
    """What this process knows about its own requests in flight at a replica."""

    read_s: float = 0.0  # when any part of an answer was last read, on any clock
    silent_s: float = 0.0  # longest that any request has waited for the next part of its answer
    prompt_tokens: int = 0  # of the longest prompt among requests that have waited as long, without any part yet


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe has ended."""

    problem: str | None = None
    refused: bool = False
    engine: EngineMetrics | None = None  # as the probe read it
    is_certain: bool = False  # whether the problem needs no second probe
    is_proven: bool = False  # whether the engine answered a request of the probe
    books: Books = field(default_factory=Books)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The replica accepts no connection, which no request can cause."""

    message: str


@dataclass(frozen=True, slots=True)
class Strike:
    """The replica failed a request that another one served, or broke the connection."""

    request: int
    message: str
    at_s: float = math.inf  # when it did so, or fell silent, which may be long ago; infinity: just now


@dataclass(frozen=True, slots=True)
class Served:
    """The replica served a request for inference or, on trial, began its answer."""


@dataclass(frozen=True, slots=True)
class Ejected:
    """The replica leaves service for a time, unless it is the last one up: any replica is better than none."""

    duration_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator drains the replica, or readmits it."""

    is_drained: bool = True


@dataclass(frozen=True, slots=True)
class Alone:
    """No other replica of its model is up: an unproven one is better than none."""


Evidence = Probed | Unreachable | Strike | Served | Ejected | Drain | Alone


def judge(health: Health, evidence: Evidence, others: Others, rules: HealthRules, now_s: float) -> Health:
    """Return a replica's health after new evidence.

    Examples
    --------
    >>> up = judge(Health(), Probed(), Others(up=1), HealthRules(), now_s=100.0)
    >>> up.state, judge(up, Unreachable("refused"), Others(up=1), HealthRules(), now_s=101.0).state
    (<State.UP: 'up'>, <State.DOWN: 'down'>)
    """
    if isinstance(evidence, Drain):
        return _drain(health, evidence, now_s)
    if health.is_drained:
        return health
    match evidence:
        case Probed():
            return _probed(health, evidence, others, rules, now_s)
        case Unreachable(message):
            return _in_state(health, State.DOWN, message, now_s)
        case Strike():
            return _strike(health, evidence, others, rules, now_s)
        case Served():
            served = replace(health, strikes=frozenset()) if health.strikes else health
            is_proven = served.state is State.RECOVERING and served.is_on_trial
            return _advance(served, others, rules, now_s, served=True) if is_proven else served
        case Ejected():
            return _eject(health, evidence, others, now_s)
        case Alone():
            return _in_state(health, State.UP, "", now_s) if health.state is State.RECOVERING else health


def _in_state(health: Health, state: State, reason: str, now_s: float) -> Health:
    if state is health.state:
        return replace(health, reason=reason)
    return replace(
        health,
        state=state,
        reason=reason,
        strikes=frozenset(),
        up_since_s=now_s if state is State.UP else math.inf,
        has_stalled=health.has_stalled and state is not State.UP,
    )


def _drain(health: Health, evidence: Drain, now_s: float) -> Health:
    if evidence.is_drained == health.is_drained:
        return health
    state, reason = State.STARTING, "readmitted by an operator, not yet checked"
    if evidence.is_drained:
        state, reason = State.DRAINING, "drained by an operator"
    return replace(_in_state(health, state, reason, now_s), is_drained=evidence.is_drained)


def _probed(health: Health, evidence: Probed, others: Others, rules: HealthRules, now_s: float) -> Health:
    if evidence.problem is not None:
        failed = replace(health, failed_probes=health.failed_probes + 1)
        if health.state is State.STARTING and evidence.refused:
            return replace(failed, reason=evidence.problem)  # it has not started yet
        is_certain = evidence.refused or evidence.is_certain or failed.failed_probes >= rules.failures
        is_certain |= health.state not in SERVING
        return _in_state(failed, State.DOWN, evidence.problem, now_s) if is_certain else failed
    health = replace(health, failed_probes=0)
    if evidence.engine is not None:
        health = _progress(health, evidence.engine, evidence, now_s)
        if stalled := _standstill(health, evidence.books, rules, now_s):
            return replace(_in_state(health, State.DOWN, stalled, now_s), has_stalled=True)
    if health.state is State.RECOVERING:
        return _advance(health, others, rules, now_s)
    return health if health.state is State.UP else _return(health, others, rules, now_s)


def _progress(health: Health, engine: EngineMetrics, evidence: Probed, now_s: float) -> Health:
    # While a long prompt is computed in parts, the token counters stand still, but KV usage grows.
    progress = (engine.prompt_tokens, engine.generation_tokens, engine.kv_usage, evidence.books.read_s)
    if progress != health.progress or evidence.is_proven:
        return replace(health, progress=progress, moved_at_s=now_s, progress_at_s=now_s)
    return replace(health, progress_at_s=now_s) if engine.running + engine.waiting == 0 else health


def _standstill(health: Health, books: Books, rules: HealthRules, now_s: float) -> str:
    """Return the evidence that an engine stands still, from its own reports or, sooner, from our books; else ""."""
    slowest_s = books.prompt_tokens / _SLOWEST_PROMPT_TOKENS_PER_S
    bound_s, silence_s = max(rules.stall_s, slowest_s), max(rules.silence_s, slowest_s)
    if now_s - health.progress_at_s > bound_s:
        return f"stands still: has requests but produced no token for {bound_s:g} s"
    if books.silent_s > silence_s and now_s - health.moved_at_s > silence_s:
        return f"stands still: a request has had no answer for {books.silent_s:.0f} s, and its counters do not move"
    return ""


def _return(health: Health, others: Others, rules: HealthRules, now_s: float) -> Health:
    """Bring back a replica that passes its probes: immediately, slowly, or after a request on trial."""
    was_ejected = health.state is State.EJECTED
    if was_ejected and others.up and now_s < health.ejected_until_s:
        return health
    is_on_trial = was_ejected or health.has_stalled  # its probes do not show either failure
    is_slow = 0 < rules.slow_start_s <= others.longest_up_s
    returning = replace(health, returning_since_s=now_s, is_on_trial=is_on_trial)
    if not others.up or not (is_on_trial or is_slow):
        return _in_state(returning, State.UP, "", now_s)
    return _in_state(returning, State.RECOVERING, _stage(returning, rules), now_s)


def _advance(health: Health, others: Others, rules: HealthRules, now_s: float, *, served: bool = False) -> Health:
    """Advance a return as time passes, or once the replica has served a request."""
    if health.is_on_trial:
        if not served and (others.trials or now_s - health.returning_since_s < _MAX_TRIAL_S):
            return health
        health = replace(health, is_on_trial=False, returning_since_s=now_s)
    if now_s - health.returning_since_s >= rules.slow_start_s:
        return _in_state(health, State.UP, "", now_s)
    return replace(health, reason=_stage(health, rules))


def _stage(health: Health, rules: HealthRules) -> str:
    """Return the stage of a return, for people."""
    if health.is_on_trial:
        return "on trial: gets one request at a time until it has served one"
    return f"slow start: gets a growing share of the requests for {rules.slow_start_s:g} s"


def _strike(health: Health, evidence: Strike, others: Others, rules: HealthRules, now_s: float) -> Health:
    if health.state not in SERVING or evidence.at_s < health.returning_since_s:
        return health  # evidence from before it left service, and perhaps of an earlier engine
    if len(health.strikes) < rules.strikes:
        health = replace(health, strikes=health.strikes | {evidence.request})
    if len(health.strikes) < rules.strikes and health.state is State.UP:
        return health
    is_relapse = now_s - health.ejected_until_s <= rules.eject_max_s
    duration_s = min(2.0 * health.ejection_s if is_relapse else rules.eject_s, rules.eject_max_s)
    return _eject(health, Ejected(duration_s, evidence.message), others, now_s)


def _eject(health: Health, evidence: Ejected, others: Others, now_s: float) -> Health:
    if health.state not in SERVING or not others.up:
        return health
    reason = f"{evidence.reason}; ejected for {evidence.duration_s:.3g} s"
    ejected = _in_state(health, State.EJECTED, reason, now_s)
    return replace(ejected, ejection_s=evidence.duration_s, ejected_until_s=now_s + evidence.duration_s)
