"""How many replicas of each method carry a traffic within its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway.rooms.fleet.demand import Rates
from policies.learned.belief import SPREAD, RequestGroup
from policies.learned.prior import StepCost
from policies.learned.replica import KnownReplica

Floats = npt.NDArray[np.float64]

_QUANTILE: Final = 2.1
"""Standard deviations to allow for chance."""
_TAIL: Final = 3.0
"""Longest wait of a first token, relative to the mean wait."""
_MOST_REQUESTS: Final = 256.0
"""Most requests in the batch of a replica."""
_IMPOSSIBLE: Final = 1e6
_FEWEST: Final = 1e-6
"""Requests per second below which traffic counts as this much."""
_ROUNDS: Final = 64
_LEAST_LEFT: Final = 1e-3
"""Least share of free time that a replica is assumed to have while a feasible spread is searched."""
_MOST_REPLICAS: Final = 1000
_MUCH_SOONER: Final = 0.9
"""Time to finish on as many other replicas, relative to the chosen ones, below which they are worth starting."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that 99% of the requests should keep; None for no target."""

    ttft_s: float | None
    tpot_s: float | None

    def __str__(self) -> str:
        """Return the targets in words."""
        ttft = f"{self.ttft_s:g} s to the first token" if self.ttft_s is not None else ""
        tpot = f"{1e3 * self.tpot_s:g} ms for each further one" if self.tpot_s is not None else ""
        return " and ".join(filter(None, (ttft, tpot)))


@dataclass(frozen=True, slots=True)
class Carrier:
    """What the policy believes about the replicas of one method."""

    cost: StepCost
    spread: float  # standard deviation of log(tokens per step) between similar requests
    per_step: Mapping[tuple[str, str, str], float]  # tokens per step by group of requests
    kv_tokens: int  # 0 if unknown

    def seconds(
        self, group: tuple[str, str, str], mean: Rates, targets: Targets, cached: float = 0.0
    ) -> tuple[float, float]:
        """Return the share of a replica that one request per second uses, and the seconds of its answer.

        Parameters
        ----------
        group
            The group of the request; an unknown one is like the mean of the others.
        mean
            Tokens of a request, per request.
        cached
            Share of the prompt tokens in prefix caches.
        """
        base_s, (steps, request_s, prefill_s) = self.cost.base_s, self.takes(group, mean, cached)
        output = max(1.0, mean.output_tokens)  # even if traffic has ended
        per_step, context = output / steps, mean.prompt_tokens + output / 2
        most = _MOST_REQUESTS if not self.kv_tokens else min(_MOST_REQUESTS, self.kv_tokens / context)
        step_s = base_s + 2.0 * most * request_s  # half of the time is for prompts
        if targets.tpot_s is not None:
            fewest = max(1.0, per_step * math.exp(-_QUANTILE * self.spread))  # a step emits at least one token
            step_s = min(step_s, targets.tpot_s * fewest)
        rate = (step_s - base_s) / (step_s * (steps * request_s + prefill_s))
        rate = min(rate, most / (steps * step_s))
        if targets.ttft_s is not None and prefill_s > 0.0:
            left_s = max(1e-9, targets.ttft_s - 2.0 * step_s)
            rate = min(rate, (1.0 - _TAIL * prefill_s / left_s) / prefill_s)
        return (1.0 / rate if rate > 1.0 / _IMPOSSIBLE else _IMPOSSIBLE), steps * step_s

    def takes(self, group: tuple[str, str, str], mean: Rates, cached: float) -> tuple[float, float, float]:
        """Return the steps of a request, the seconds that it adds to each, and those of its prompt."""
        per_step = self.per_step.get(group) or 1.0 / float(np.mean([1.0 / each for each in self.per_step.values()]))
        output = max(1.0, mean.output_tokens)
        context_s = (mean.prompt_tokens + output / 2) * self.cost.per_context_token_s
        prefill_s = mean.prompt_tokens * (1.0 - cached) * self.cost.per_prompt_token_s
        return output / per_step, self.cost.per_request_s + context_s, prefill_s


def carrier(replica: KnownReplica, groups: Sequence[RequestGroup], batch: float, kv_tokens: int) -> Carrier:
    """Return what the policy believes about a backend, which stands for all of its method."""
    per_step = {
        (group.workload, group.template, group.temperature): belief.tokens_per_step
        for group in groups
        for belief in group.backends
        if belief.backend == replica.name
    }
    return Carrier(replica.cost(batch), SPREAD, per_step, kv_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """The demand of a traffic on each method."""

    methods: tuple[str, ...]
    costs: Floats  # share of a replica that the requests of each group use; of shape (groups, methods)
    headroom: float  # factor by which chance may raise the requests in flight
    rates: Floats  # requests per second of each group
    base_s: Floats  # seconds of an empty step of each method
    takes: Floats  # demand of a request, see `Carrier.takes`; of shape (3, groups, methods)

    def saturation(self, counts: Mapping[str, int]) -> float:
        """Return the load of the busiest replica if requests are spread optimally; above 1 is too much.

        It is the dual of a linear program: prices of the methods at which no request has a cheaper one.
        """
        usable = np.array([counts.get(each, 0) for each in self.methods], float)
        if not usable.any():
            return math.inf
        costs = self.costs[:, usable > 0] / usable[usable > 0]
        rows, best = np.arange(len(costs)), 0.0
        prices = 1.0 / costs.mean(0)
        for at in range(_ROUNDS):
            prices = prices / prices.sum()
            priced = costs * prices
            to = priced.argmin(1)
            best = max(best, float(priced[rows, to].sum()))
            loads = np.bincount(to, costs[rows, to], minlength=len(prices))
            prices = prices * np.exp(loads / max(float(loads.max()), 1e-12) / (2.0 + at))
        return best * self.headroom

    def finish_s(self, counts: Mapping[str, int]) -> float:
        """Return the mean seconds to finish if requests are spread optimally; infinite if there are too many.

        The requests of a replica share its steps: what they add leaves part of the time to the empty step. The spread
        has the fewest requests in flight, found by the Frank-Wolfe algorithm: each goes where the sum of its own time
        and the delay that it causes is least.
        """
        usable = np.array([counts.get(each, 0) for each in self.methods], float)
        at = usable > 0
        usable, base_s, (steps, request_s, prefill_s) = usable[at], self.base_s[at], self.takes[:, :, at]
        work_s, sent = steps * request_s + prefill_s, np.zeros(steps.shape)  # sent: requests per second of each replica

        def step_s() -> Floats:
            return np.asarray(base_s / np.maximum(_LEAST_LEFT, 1.0 - (sent * work_s).sum(0)))

        for number in range(_ROUNDS):
            each_s = step_s()
            price = steps * each_s + prefill_s + (sent * steps).sum(0) * each_s**2 / base_s * work_s
            best = np.zeros(steps.shape)
            best[np.arange(len(best)), price.argmin(1)] = 1.0
            sent += 2.0 / (number + 2.0) * (self.rates[:, None] * best / usable - sent)
        if (sent * work_s).sum(0).max() >= 1.0:
            return math.inf
        return float((sent * usable * (steps * step_s() + prefill_s)).sum() / self.rates.sum())

    def needed(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return the fewest replicas that suffice, by adding what helps most and removing what helps least.

        As many others replace them if requests finish much sooner there. Returns none if the targets are out of reach.
        """
        is_hopeless = self.costs.min(1).sum() * self.headroom > _MOST_REPLICAS
        found = {each: counts.get(each, 0) for each in self.methods}

        def others(by: int) -> list[dict[str, int]]:
            return [{**found, each: found[each] + by} for each in self.methods if found[each] + by >= 0]

        while self.saturation(found) > 1.0:
            if is_hopeless or sum(found.values()) >= _MOST_REPLICAS:
                return {}
            found = min(others(1), key=self.saturation)
        while self.saturation(fewer := min(others(-1), key=self.saturation)) <= 1.0:
            found = fewer
        while True:
            pairs = [(a, b) for a, b in permutations(self.methods, 2) if found[a]]
            swapped = [{**found, a: found[a] - 1, b: found[b] + 1} for a, b in pairs]
            enough = [each for each in swapped if self.saturation(each) <= 1.0]
            sooner = min(enough, key=self.finish_s, default=found)
            if not self.finish_s(sooner) < _MUCH_SOONER * self.finish_s(found):
                return found
            found = sooner


@dataclass(frozen=True, slots=True)
class World:
    """A traffic's requests, and the replicas that can carry it."""

    groups: Sequence[RequestGroup]  # its requests, in their recent shares
    carriers: Mapping[str, Carrier]  # by method
    targets: Targets
    cached: float  # share of the prompt tokens in prefix caches
    factors: Sequence[float]  # on the demand on each method, to correct the formulas

    def load_of(self, rates: Rates) -> Load:
        """Return the demand of a traffic on each method."""
        requests, carriers = max(rates.requests, _FEWEST), self.carriers.values()
        mean = Rates(1.0, rates.prompt_tokens / requests, rates.output_tokens / requests)
        seen = np.array([group.requests for group in self.groups])
        of_groups = requests * seen / seen.sum()
        keys = [(group.workload, group.template, group.temperature) for group in self.groups]
        taken = np.array([[each.seconds(key, mean, self.targets, self.cached) for each in carriers] for key in keys])
        takes = np.array([[each.takes(key, mean, self.cached) for each in carriers] for key in keys])
        in_flight = float(of_groups @ taken[:, :, 1].min(1))
        return Load(
            tuple(self.carriers),
            np.array(self.factors) * of_groups[:, None] * taken[:, :, 0],
            1.0 + _QUANTILE / math.sqrt(max(in_flight, 1.0)),
            of_groups,
            np.array([each.cost.base_s for each in carriers]),
            takes.transpose(2, 0, 1),
        )
