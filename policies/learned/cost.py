"""The one sum that decides: a request's own time and the delay of others, in seconds, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.learned.replica import KnownReplica, Work, numbers
from policies.learned.settings import Objective
from policies.learned.table import RequestKind
from policies.learned.undrafted import steps_of


class Ask:
    """The expectations of a request that do not depend on the replica."""

    __slots__ = ("attention", "coming_per_s", "context_tokens", "crowd", "holders", "stretch", "tokens")

    def __init__(
        self,
        tokens: float,
        context_tokens: float,
        holders: list[int],
        attention: float,
        stretch: float,
        coming_per_s: float,
        crowd: float,
    ) -> None:
        self.tokens = tokens  # of one of its sequences
        self.context_tokens = context_tokens  # mean over its steps
        self.holders = holders  # see `PrefixMemory.holders`
        self.attention = attention  # share of a prompt token's time that each earlier token adds
        self.stretch = stretch  # factor on step times for the prompts that arrive meanwhile
        self.coming_per_s = coming_per_s  # requests that each second of prompts delays
        self.crowd = crowd  # requests in flight per replica


def coming(arrivals_per_s: float, prefill_s: float) -> tuple[float, float]:
    """Return `Ask.stretch` and `Ask.coming_per_s`: arriving prompts lengthen steps and queues."""
    stretch = 1.0 / (1.0 - min(_MOST_BUSY, arrivals_per_s * prefill_s))
    return stretch, arrivals_per_s * stretch


def weighed(tokens: float, cached: float, attention: float) -> float:
    """Return the tokens at a prompt's start that take as long as `tokens` after `cached` ones, which they attend."""
    return tokens * (1.0 + attention * (cached + tokens / 2))


class Delay(Work):
    """The delay of a request on one replica, in seconds; if it is sent there, also its work."""

    __slots__ = (
        "cached_tokens",
        "decode_s",
        "is_compared",
        "kind",
        "others_s",
        "per_step",
        "replica",
        "requests",
        "room",
        "step_s",
        "tokens",
        "ttft_s",
    )
    kind: RequestKind  # of the request, once it is sent
    is_compared: bool  # whether it is part of the comparison with `least_loaded`

    def __init__(  # noqa: PLR0917 -- compiled, keywords cost more
        self,
        replica: KnownReplica,
        request: RequestFeatures,
        ask: Ask,
        by_k: Sequence[float],  # log(tokens per step) expected at each k
        excess: float,  # what this request is expected to add to that
        found: tuple[float, float],  # by the detector: factor on step times, and share of drafts accepted
        requests: int,
        waiting: int,  # of `requests`, in the engine's queue
        now_s: float,
    ) -> None:
        self.replica, self.requests, self.context_tokens = replica, requests, ask.context_tokens
        self.tokens = ask.tokens
        sequences, reach = request.n, replica.reach
        slow, accepted = found
        cost = replica.seconds
        if replica.depth is not None:
            cost = numbers(replica.cost(requests - waiting + sequences))
        base_s, per_request_s, per_context_s, per_prompt_s = cost

        # Steps: tokens over tokens per step; beyond a drafter's limit, each token is a step.
        per_step = replica.per_step(by_k, excess, requests - waiting + sequences, accepted)
        self.undrafted, self.room = reach.expected(request, ask.tokens)
        is_limited = self.undrafted or replica.undrafted
        self.steps = steps = (
            steps_of(ask.tokens, self.undrafted, replica.undrafted, per_step)
            if is_limited
            else max(1.0, ask.tokens / per_step)
        )
        self.per_step = ask.tokens / steps if is_limited else per_step

        # A step: its base, and what each request adds. S steps share S R / (S + R) with a request that has R left.
        mine_s = adds_s = slow * sequences * (per_request_s + per_context_s * ask.context_tokens)
        left, theirs_s = steps, mine_s
        if requests and replica.sent:
            left = replica.steps / replica.sent
            theirs_s = slow * (per_request_s + per_context_s * replica.context_tokens / replica.sent)
        alone_s = slow * base_s + mine_s
        self.step_s = step_s = alone_s + requests * theirs_s
        shared = requests * steps * left / (steps + left)
        if replica.depth is not None and requests and replica.sent:  # joining may lower the k of all others
            adds_s = step_s - slow * replica.without_s(requests - waiting, requests, by_k, excess, accepted, per_step)

        # Its prompt: uncached tokens, behind waiting prompts and requests.
        self.cached_tokens = cached = replica.prefixes.cached_tokens(request, ask.holders) if ask.holders else 0.0
        new = max(1.0, request.prompt_tokens - cached)
        self.prompt_work = weighed(new, request.prompt_tokens - new, ask.attention)
        self.prefill_s = prefill_s = slow * replica.prompts.token_s(per_prompt_s) * self.prompt_work
        wait_s = replica.prefill_left_s(now_s) if requests else 0.0
        delayed = requests + ask.coming_per_s * (wait_s + prefill_s)
        if evicted := replica.prefixes.recomputed(new, now_s):  # later prompts whose prefixes it evicts
            crowd = 1.0 + ask.crowd + ask.coming_per_s * prefill_s
            delayed += evicted * min(1.0, ask.crowd / _CROWDED) * crowd
        self.ttft_s = (replica.joins if requests else 1.5) * step_s + wait_s + prefill_s
        if waiting:  # a waiting request is admitted when a running one ends
            self.ttft_s += waiting / max(1, requests - waiting) * left * step_s

        self.decode_s = ask.stretch * (steps * alone_s + shared * theirs_s)
        self.others_s = ask.stretch * shared * adds_s + delayed * prefill_s
        if is_limited and requests:  # the drafts that it stops in its batch
            self.others_s += step_s * reach.taken(self.undrafted, replica.undrafted, requests, per_step)

    @property
    def own_s(self) -> float:
        """Seconds from start to end of the request."""
        return self.ttft_s + self.decode_s

    def begin(self, kind: RequestKind, now_s: float, *, is_compared: bool) -> None:
        """Start to count as the work that a request of this kind adds there."""
        self.kind, self.is_compared = kind, is_compared
        self.beyond_from_s = now_s + self.room * self.step_s / self.per_step / _FASTER


class Sum:
    """The sum to minimize: the seconds of the request and of the others, each with its weight."""

    def __init__(self, objective: Objective, slo_ttft_s: float | None, slo_tpot_s: float | None) -> None:
        self._is_goodput = objective is Objective.GOODPUT
        self._ttft, self._decode, self._others = _WEIGHTS.get(objective, (1.0, 1.0, 1.0))
        self._slo_ttft_s, self._slo_tpot_s = slo_ttft_s, slo_tpot_s
        self._mean_urgency = 0.0

    def of(self, request: RequestFeatures, delays: list[Delay], *, is_sent: bool) -> list[float]:
        """Return the cost of a request on each replica, in seconds or weighted seconds."""
        overuse = request.overuse
        if self._is_goodput:
            return self._goodput(request, delays, is_sent=is_sent)
        ttft, decode, others = self._ttft, self._decode, self._others * overuse
        return [ttft * one.ttft_s + decode * one.decode_s + others * one.others_s for one in delays]

    def _goodput(self, request: RequestFeatures, delays: list[Delay], *, is_sent: bool) -> list[float]:
        """Weigh its own seconds by its probability to miss its SLO, and those of others by theirs.

        A fixed penalty for each miss keeps fewer SLOs: a request slows others for as long as it runs.
        """
        ttft_s, tpot_s = request.slo_ttft_s or self._slo_ttft_s, request.slo_tpot_s or self._slo_tpot_s
        mean, costs = self._mean_urgency, []
        for one in delays:
            kept = _kept(one.ttft_s, ttft_s) * _kept(one.step_s / one.per_step, tpot_s)
            urgency = _URGENCY * (1.0 - kept)
            mean += _NEW * (urgency - mean)
            costs.append((1.0 + urgency) * one.own_s + (1.0 + mean) * request.overuse * one.others_s)
        if is_sent:
            self._mean_urgency = mean
        return costs


def crowd_of(candidates: Sequence[Candidate]) -> float:
    """Return the requests in flight per replica."""
    in_flight = 0
    for one in candidates:
        in_flight += one.in_flight
    return in_flight / len(candidates)


def _kept(expected_s: float, bound_s: float | None) -> float:
    """Return the probability of meeting a bound: a logistic function of the log ratio."""
    if not bound_s or expected_s <= 0.0:
        return 1.0
    return 1.0 / (1.0 + math.exp(min(50.0, max(-50.0, math.log(expected_s / bound_s) / _SOFTNESS))))


_TIE: Final = 0.05
"""Weight of the total delay for an objective other than latency, so that ties go to the faster replica."""
_WEIGHTS: Final = {Objective.TTFT: (1.0 + _TIE, _TIE, _TIE), Objective.TPOT: (_TIE, 1.0, 1.0 + _TIE)}
_URGENCY: Final = 2.0
"""Additional weight of a second if the request will surely miss its SLO."""
_SOFTNESS: Final = 0.6
"""Scale of a prediction's relative error: answers differ in acceptance, and the load changes while they run."""
_NEW: Final = 0.002
_MOST_BUSY: Final = 0.8
"""Cap on the share of a replica's time that prompts take, in the cost of another one."""
_CROWDED: Final = 6.0
"""Requests in flight per replica from which an eviction costs its full later recomputation."""
_FASTER: Final = 1.5
"""How much faster than expected an answer may reach the limit."""
