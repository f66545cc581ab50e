"""How many replicas of which method carry a traffic within its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway.fleet.demand import Rates
from policies.learned.belief import Group
from policies.learned.models.backend_model import BackendModel
from policies.learned.models.prior import StepCost

Floats = npt.NDArray[np.float64]

_QUANTILE: Final = 2.1
"""Standard deviations of what is left to chance."""
_TAIL: Final = 3.0
"""Times the mean wait that a first token may have to wait."""
_MOST_REQUESTS: Final = 256.0
"""Requests in the batch of a replica."""
_IMPOSSIBLE: Final = 1e6
_FEWEST: Final = 1e-6
"""Requests per second of a traffic that has ended."""
_ROUNDS: Final = 64
_MOST_REPLICAS: Final = 1000


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that 99% of the requests are to keep; None for any."""

    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class Carrier:
    """What the policy believes of the replicas of one method."""

    cost: StepCost
    spread: float  # standard deviation of log(tokens per step) between similar requests
    per_step: Mapping[tuple[str, str, str], float]  # tokens per step by group of requests
    kv_tokens: int  # 0 if unknown

    def seconds(
        self, group: tuple[str, str, str], mean: Rates, targets: Targets, cached: float = 0.0
    ) -> tuple[float, float]:
        """Return the share of a replica that one request per second takes, and the seconds that its answer takes.

        Parameters
        ----------
        group
            The group of the request; one that is not known is like the others.
        mean
            Tokens of a request, per request.
        cached
            Share of the prompt tokens that prefix caches have.
        """
        per_step = self.per_step.get(group) or 1.0 / float(np.mean([1.0 / each for each in self.per_step.values()]))
        base_s, per_request_s, per_context_s, per_prompt_s = self.cost
        prompt, output = mean.prompt_tokens * (1.0 - cached), max(1.0, mean.output_tokens)
        context = mean.prompt_tokens + output / 2
        most = _MOST_REQUESTS if not self.kv_tokens else min(_MOST_REQUESTS, self.kv_tokens / context)
        request_s = per_request_s + context * per_context_s
        step_s = base_s + 2.0 * most * request_s  # half of it for prompts
        if targets.tpot_s is not None:
            fewest = max(1.0, per_step * math.exp(-_QUANTILE * self.spread))  # a step emits a token at least
            step_s = min(step_s, targets.tpot_s * fewest)
        steps = output / per_step
        rate = (step_s - base_s) / (step_s * (steps * request_s + prompt * per_prompt_s))
        rate = min(rate, most / (steps * step_s))
        if targets.ttft_s is not None and (prefill_s := prompt * per_prompt_s) > 0.0:
            left_s = max(1e-9, targets.ttft_s - 2.0 * step_s)
            rate = min(rate, (1.0 - _TAIL * prefill_s / left_s) / prefill_s)
        return (1.0 / rate if rate > 1.0 / _IMPOSSIBLE else _IMPOSSIBLE), steps * step_s


def carrier(model: BackendModel, groups: Sequence[Group], batch: float, kv_tokens: int) -> Carrier:
    """Return what the policy believes of a backend, which stands for all of its method."""
    per_step = {
        (group.workload, group.template, group.temperature): belief.tokens_per_step
        for group in groups
        for belief in group.backends
        if belief.backend == model.name
    }
    return Carrier(model.cost_at(model.place(batch)), model.spread, per_step, kv_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """What a traffic takes of each method."""

    methods: tuple[str, ...]
    costs: Floats  # share of a replica that the requests of each group take; of shape (groups, methods)
    headroom: float  # by how much more may be in flight at a time, by chance

    def saturation(self, counts: Mapping[str, int]) -> float:
        """Return the load of the busiest replica where requests are spread as well as can be; above 1 is too much.

        It is what a linear programme has as its dual: prices of the methods, at which no request goes to a cheaper one.
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

    def needed(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return how many replicas suffice, by adding what helps most and removing what helps least."""
        counts = {each: counts.get(each, 0) for each in self.methods}

        def other(method: str, by: int) -> float:
            return self.saturation({**counts, method: counts[method] + by})

        while self.saturation(counts) > 1.0 and sum(counts.values()) < _MOST_REPLICAS:
            counts[min(self.methods, key=lambda method: other(method, 1))] += 1
        while sum(counts.values()) > 1:
            after, method = min((other(each, -1), each) for each in self.methods if counts[each])
            if after > 1.0:
                break
            counts[method] -= 1
        return counts


def load_of(
    rates: Rates,
    groups: Sequence[Group],
    carriers: Mapping[str, Carrier],
    targets: Targets,
    cached: float,
    factor: float,
) -> Load:
    """Return what a traffic takes of each method, for requests of the groups in the shares that were seen of late.

    All of it is multiplied by a factor, which makes up for what is not in the formulas.
    """
    total = sum(group.requests for group in groups)
    requests = max(rates.requests, _FEWEST)
    mean = Rates(1.0, rates.prompt_tokens / requests, rates.output_tokens / requests)
    costs, in_flight = np.zeros((len(groups), len(carriers))), 0.0
    for row, group in enumerate(groups):
        rate, key = requests * group.requests / total, (group.workload, group.template, group.temperature)
        taken = [each.seconds(key, mean, targets, cached) for each in carriers.values()]
        costs[row] = [rate * share for share, _ in taken]
        in_flight += rate * min(answer_s for _, answer_s in taken)
    return Load(tuple(carriers), factor * costs, 1.0 + _QUANTILE / math.sqrt(max(in_flight, 1.0)))
