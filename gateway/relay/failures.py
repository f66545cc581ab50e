"""Decides what follows from a failure: a rule per kind, and one pure function; `gateway.relay.failover` carries it out.

`scripts/docs` prints it as the table of docs/reliability.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from gateway.dialects.errors import GatewayError


class Step(Enum):
    """What to do with a request after a failure."""

    RETRY = "retry"
    GO_ON = "rescue"
    CLOSE = "the missing end of the stream is written"
    COMPLETE = "answered: the client has all of it"
    ENGINE_ERROR = "own error"
    WAIT = "waits"
    TIME_OUT = "its time is over"
    FAIL = "error"


class Failure(NamedTuple):
    """A failure of a backend."""

    kind: str  # one of `RULES`
    message: str = ""  # what the backend did; empty if that is never evidence
    is_proof: bool = False  # whether it is evidence by itself, if no other replica can try
    otherwise: Step | None = None  # step in place of an error of the gateway


class Blame(Enum):
    """When a failure is a strike: evidence against the replica, as the pool counts it."""

    NEVER = "no"
    IF_SERVED = "if another serves it"
    NOW = "yes"


class Has(Enum):
    """What the client has of the answer."""

    NOTHING = "nothing"
    PART = "part of a stream"
    ALL = "the last event"


class Outlook(Enum):
    """What can be done for a stream of which the client has part."""

    NONE = "no"
    ELSEWHERE = "another replica"
    END = "only its end is missing"


class Notice(Enum):
    """What is reported to the pool besides strikes."""

    NOTHING = ""
    FAILURE = "probes it"
    UNREACHABLE = "takes it out"
    TIMEOUT = "probes it; a strike if it shows no work"


class Retried(Enum):
    """Which requests may be sent to another replica."""

    NEVER = "no"
    IF_REPEATABLE = "yes"
    ALWAYS = "yes, also with effects: it got nothing"


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows from one kind of failure."""

    what: str
    retried: Retried = Retried.IF_REPEATABLE
    is_free: bool = False  # whether the replica no longer works on it: the retry does not use the budget
    is_full: bool = False  # whether it has no room: the retry does not count, and the next may have room
    goes_on: bool = True  # whether another replica may resume a stream
    otherwise: Step = Step.FAIL
    blame: Blame = Blame.IF_SERVED  # for a failure after which the request went to another replica
    report: Notice = Notice.FAILURE


_NO_ROOM: Final = partial(
    Rule,
    is_free=True,
    is_full=True,
    goes_on=False,
    otherwise=Step.ENGINE_ERROR,
    blame=Blame.NEVER,
    report=Notice.NOTHING,
)
RULES: Final = {
    "connect": Rule(
        "no connection",
        Retried.ALWAYS,
        is_free=True,
        blame=Blame.NEVER,
        report=Notice.UNREACHABLE,
    ),
    "broken": Rule("a cut, or an answer that is given up: no last event, no reason to finish, `abort`"),
    "garbage": Rule("not HTTP, or not the answer that was asked for"),
    "refused": Rule("another status than 200 to a request for the rest of a stream"),
    "status": Rule("500, 502 or 503", goes_on=False, otherwise=Step.ENGINE_ERROR),
    "key": Rule("401: another key than the gateway has", Retried.ALWAYS, is_free=True, goes_on=False),
    "model": Rule("404: another model at its address", Retried.ALWAYS, is_free=True, goes_on=False),
    "busy": _NO_ROOM("429, or a 503 that says that the replica is full"),
    "length": _NO_ROOM("400: longer than its context, where another replica has a longer one"),
    "error": Rule("an error of the engine within a stream", otherwise=Step.ENGINE_ERROR),
    "stalled": Rule(
        "a pause of seconds within a stream, while other streams of the replica go on",
        Retried.NEVER,
        otherwise=Step.WAIT,
        blame=Blame.NEVER,
        report=Notice.NOTHING,
    ),
    "down": Rule("its probes find it down, and nothing comes", is_free=True, blame=Blame.NEVER, report=Notice.NOTHING),
    "trial": Rule(
        "on trial, silent and without progress",
        is_free=True,
        goes_on=False,
        otherwise=Step.WAIT,
        blame=Blame.NOW,
        report=Notice.NOTHING,
    ),
    "timeout": Rule("silent for longer than `timeouts` allow", Retried.NEVER, goes_on=False, report=Notice.TIMEOUT),
    "redirect": Rule("a redirect to another server", Retried.NEVER, goes_on=False, report=Notice.NOTHING),
    "exhausted": Rule("the gateway has no file or port left", Retried.NEVER, goes_on=False, report=Notice.NOTHING),
}
"""By kind of failure, as errors (`backend_broken`) and metrics name it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The situation of a request when its replica fails."""

    has: Has
    was_retried: bool = False  # whether it was sent to another replica before
    may_move: bool = True  # whether it may go to another replica: not if it names one, or a proxy sends it
    may_repeat: bool = True  # whether it may run twice: inference only costs time, others may have side effects
    has_other: bool = True  # whether another replica is up
    has_budget: bool = True  # whether the model's retry budget has one left
    is_on_trial: bool = False  # whether it was sent to test if its replica serves again
    outlook: Outlook = Outlook.NONE  # for the rest of the stream
    is_proof: bool = False  # whether the failure is evidence by itself, if no other replica can try it
    is_first_suspect: bool = True  # whether no other replica is already suspected for it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a failure."""

    step: Step
    blame: Blame
    lacks_budget: bool = False  # whether only the retry budget prevented a retry


def verdict_on(kind: str, now: Situation) -> Verdict:
    """Return what follows from a failure.

    Examples
    --------
    >>> verdict_on("broken", Situation(Has.NOTHING)).step.name
    'RETRY'
    >>> verdict_on("broken", Situation(Has.PART, is_proof=True))
    Verdict(step=<Step.FAIL: 'error'>, blame=<Blame.NOW: 'yes'>, lacks_budget=False)
    """
    rule = RULES[kind]
    lacks_budget = False
    if now.has is Has.ALL:  # after the last event, no client is affected
        return Verdict(Step.COMPLETE, Blame.NEVER)
    if now.has is Has.PART and rule.goes_on:
        if now.outlook is Outlook.END:
            return Verdict(Step.CLOSE, Blame.IF_SERVED if now.is_proof else Blame.NEVER)
        if now.outlook is Outlook.ELSEWHERE and now.has_other:
            return Verdict(Step.GO_ON, Blame.IF_SERVED if now.is_proof else Blame.NEVER)
    if now.has is Has.NOTHING and now.may_move and now.has_other and _is_retried(rule, now):
        if rule.is_free or now.is_on_trial or now.has_budget:
            return Verdict(Step.RETRY, rule.blame)
        lacks_budget = True
    is_strike = now.is_proof and now.is_first_suspect and not lacks_budget and rule.otherwise is Step.FAIL
    return Verdict(rule.otherwise, Blame.NOW if is_strike else Blame.NEVER, lacks_budget)


def _is_retried(rule: Rule, now: Situation) -> bool:
    if now.was_retried and not rule.is_full:
        return False
    return rule.retried is Retried.ALWAYS or (rule.retried is Retried.IF_REPEATABLE and now.may_repeat)


_STATUSES: Final = {"timeout": 504, **dict.fromkeys(("connect", "down", "exhausted", "key", "model"), 503)}
_ADVICE: Final = {
    **dict.fromkeys(("connect", "down", "exhausted", "broken"), " Send the request again."),
    "timeout": " It may be busy: have the answer streamed, or ask for less.",
}


def backend_failed(backend: str, kind: str, message: str, *, has_begun: bool, may_repeat: bool) -> GatewayError:
    """Return the error for the failure of a backend.

    Examples
    --------
    >>> backend_failed("a", "broken", "closed the connection", has_begun=True, may_repeat=True).message
    'Backend a closed the connection: this answer is not complete. Send the request again.'
    """
    message = f"Backend {backend} {message}"
    if has_begun:
        message += ": this answer is not complete"
    status = _STATUSES.get(kind, 502)
    retry_after_s = 2.0 if status == 503 else None
    message = f"{message}.{_ADVICE.get(kind, '') if may_repeat else ''}"
    return GatewayError(status, message, code=f"backend_{kind}", retry_after_s=retry_after_s)
