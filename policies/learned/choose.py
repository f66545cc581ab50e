"""The choice for each request: the delay on each replica, the one sum, and the replica where that is least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from backends.backend import Candidate
from policies.decision import Decision
from policies.drafter_limits import sparing
from policies.features.request import RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.learned.cost import Delay, Sum
from policies.learned.known import Known
from policies.learned.table import RequestKind
from policies.load import MIN_WEIGHT, LoadMeter, draw, lowest_propensities
from policies.trouble.troubles import Troubles


class Chooser:
    """Chooses by what is known; in the guardrail's blocks of time, as `least_loaded` does."""

    def __init__(
        self, name: str, known: Known, total: Sum, guardrail: Guardrail, troubles: Troubles, meter: LoadMeter
    ) -> None:
        self._name, self._known, self._sum = name, known, total
        self._guardrail, self._troubles, self._meter = guardrail, troubles, meter

    def delays(
        self, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float
    ) -> tuple[RequestKind, list[Delay]]:
        """Return the kind of a request, and its delay on each candidate."""
        kind = self._known.kinds.of(request)
        return kind, self._known.delays(request, candidates, kind, now_s, self._meter.oldest_s())

    def costs(self, request: RequestFeatures, candidates: Sequence[Candidate], delays: list[Delay]) -> list[float]:
        """Return the sum for each candidate, in seconds; changes nothing."""
        costs = self._sum.of(request, delays, is_sent=False)
        self._troubles.price(request, candidates, costs, is_sent=False)
        return costs

    def choose(
        self,
        request: RequestFeatures,
        candidates: Sequence[Candidate],
        now_s: float,
        rng: Random,
        *,
        is_sent: bool,
        explains: bool,
    ) -> Decision:
        """Choose the candidate with the least sum, and add the request to its work if it is sent."""
        known = self._known
        kind, delays = self.delays(request, candidates, now_s)
        costs = self._sum.of(request, delays, is_sent=is_sent)
        if self._troubles.found:
            self._troubles.price(request, candidates, costs, is_sent=is_sent)
        chosen, reason, propensity = 0, "least_delay", 1.0
        for index, cost in enumerate(costs):
            if cost < costs[chosen]:
                chosen = index
        odds: list[float] | None = None
        if self._guardrail.by_control(now_s):
            odds = _least_loaded(request, candidates, delays)
            chosen, reason = draw(odds, rng), "frozen" if self._guardrail.frozen else "control"
            propensity = odds[chosen]
        delay = delays[chosen]
        if is_sent:
            known.send(request, kind, delay, delays, now_s, is_compared=len(candidates) > 1)
        name, cached_tokens, cached_by = (
            candidates[chosen].name,
            int(delay.cached_tokens),
            delay.replica.prefixes.goes_by,
        )
        if not explains:
            return Decision(name, self._name, reason, propensity, delay, cached_tokens, cached_by)
        return Decision(
            name,
            self._name,
            reason,
            propensity,
            delay,
            cached_tokens,
            cached_by,
            candidates,
            [one.own_s for one in delays],
            odds or [float(index == chosen) for index in range(len(candidates))],
            costs,
        )

    def follow(
        self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float
    ) -> Decision:
        """Return another policy's decision with a memo that lets this one learn from the outcome."""
        chosen = [one for one in candidates if one.name == decision.backend]
        kind, delays = self.delays(request, chosen, now_s)
        self._known.send(request, kind, delays[0], delays, now_s, is_compared=False)
        return replace(decision, memo=delays[0], cached_tokens=0, cached_by="")


def _least_loaded(request: RequestFeatures, candidates: Sequence[Candidate], delays: list[Delay]) -> list[float]:
    """Return the propensities of `least_loaded`, except where thousands of tokens more must be computed than elsewhere.

    A conversation of 100,000 tokens sent where it is not cached would slow the whole pool, and show nothing.
    """
    spared = sparing(request, candidates)
    new = [request.prompt_tokens - one.cached_tokens for one in delays]
    most = min(tokens for one, tokens in zip(candidates, new, strict=True) if one in spared) + _LONG_PROMPT
    return lowest_propensities(
        [
            (delay.requests + 1) / (one.weight or MIN_WEIGHT) if one in spared and tokens < most else math.inf
            for one, delay, tokens in zip(candidates, delays, new, strict=True)
        ]
    )


_LONG_PROMPT: Final = 2048
