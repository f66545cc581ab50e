"""A replica: the cost of its steps at each batch size, and the work sent there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from backends.backend import Candidate, EngineLoad
from backends.calibration.parameters import ASYNCHRONOUS
from backends.draft_schedule import effective_k
from policies.arm import arm_of
from policies.learned.depth import Place, between, depth_of, mixed
from policies.learned.prefix_memory import BackendPrefixes
from policies.learned.prior import StepCost, Text, adaptive_schedule, expected_of, expected_step
from policies.learned.shadow_drafting import SHADOWED
from policies.learned.undrafted import Reach
from policies.statistics import Key, Sums, Table

STEPS: Final = Table("step_factors", 20, half_life_s=900.0, overflow=lambda key: key)
"""By replica: count, log(observed / calibration), the normal equations of the four factors of `fit_factors`, and the
sums of the seconds of a step and of the load that answers met."""

Load = tuple[float, float, float]
"""Mean requests, their total context tokens, and prompt work per step."""
Factors = tuple[float, float, float, float]
"""Ratios to the calibration's seconds: of a step itself, per request, per context token and per prompt token."""


class Work:
    """The work that a request adds to a replica."""

    __slots__ = ("beyond_from_s", "context_tokens", "mark", "prefill_s", "prompt_work", "steps", "undrafted")
    steps: float
    context_tokens: float
    prefill_s: float
    prompt_work: float  # prompt tokens to compute, weighted by attention
    undrafted: float  # steps beyond the drafter's limit
    beyond_from_s: float  # when it may reach the limit
    mark: tuple[float, float, float, float, float]  # the load's integrals when it was sent


class PromptTimes:
    """The seconds per prompt token of a replica, from the times of long prompts."""

    def __init__(self) -> None:
        self._count = self._mean_log = 0.0
        self._mixed_s = 0.0, 0.0  # seconds fitted to step times, and combined with those of prompts

    def token_s(self, fitted_s: float) -> float:
        """Return the seconds per prompt token: the value fitted to step times counts as one prompt."""
        if not self._count:
            return fitted_s
        if fitted_s != self._mixed_s[0]:
            log = math.log(max(1e-9, fitted_s))
            self._mixed_s = fitted_s, math.exp((log + self._count * self._mean_log) / (1.0 + self._count))
        return self._mixed_s[1]

    def learn(self, seconds: float, work: float, prior_s: float) -> None:
        """Learn from the time of a prompt, if it is long; clip errors at a factor of three."""
        expected_s = work * prior_s
        if work < _LONG_PROMPT or not _LEAST_RATIO * expected_s <= seconds <= _MOST_RATIO * expected_s:
            return
        error = math.log(seconds / work) - self._mean_log
        if self._count:
            error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        self._count = min(_MOST_PROMPTS, self._count + 1.0)
        self._mean_log += error / self._count
        self._mixed_s = 0.0, 0.0

    def forget(self) -> None:
        """Drop what was learned."""
        self._count = self._mean_log = 0.0


class KnownReplica:
    """What is known about a replica."""

    def __init__(self, candidate: Candidate, calibration: str, prefixes: BackendPrefixes) -> None:
        method, k = candidate.method, effective_k(candidate.method, candidate.num_speculative_tokens)
        self.name, self.method, self.k, self.arm = candidate.name, method, k, arm_of(candidate)
        self.own = f"{self.arm}@{self.name}"  # its key in the table for the deviation from its arm
        self.apart = 0.0  # mean deviation, as last read
        self.prefixes, self._most = prefixes, math.log(k + 1.0)
        schedule = candidate.draft_schedule
        if schedule.adaptive:
            schedule = adaptive_schedule(calibration, method, schedule)
        self.depth = depth_of(schedule)
        levels: list[tuple[int, int | None, int]] = [(k, None, k)]
        if self.depth is not None:
            levels = [(k, level, k) if schedule.adaptive else (level, None, k) for level in self.depth.levels]
        self.priors = [expected_step(calibration, method, *level) for level in levels]
        self.has_shadow = method in SHADOWED
        self.joins = 2.5 if method in ASYNCHRONOUS else 1.5
        self.reach = Reach(float(k), may_have_limit=k > 0 and not self.has_shadow)
        self._calibration, self._expected = calibration, dict[Text, tuple[float, ...]]()
        self.load = EngineLoad()
        self.waiting = self.others = 0
        self.drafts = self._counted = 0, 0
        self.shown = 0.0  # share of its recent answers that show their tokens per step
        self.learn((1.0, 1.0, 1.0, 1.0), 0.0)
        self.prompts = PromptTimes()
        self.sent = self.requests = 0
        self.steps = self.context_tokens = self.prefill_s = self.undrafted = 0.0
        self._beyond: dict[int, Work] = {}  # of requests that may exceed the limit, by `id`
        self._undrafted_at_s = -math.inf
        self._at_s = self._request_s = self._context_s = self._prompt_work = self._heard_s = 0.0
        self._prefill_until_s = self._told_until_s = 0.0

    # What its steps cost

    def learn(self, factors: Factors, observed: float) -> None:
        """Set the factors of a fit, and the number of answers behind it."""
        self.observed = observed
        self.costs = [StepCost(*map(float.__mul__, factors, prior)) for prior in self.priors]
        # The first as plain numbers, which compiled code reads fastest.
        self.seconds, self._prior = numbers(self.costs[0]), numbers(self.priors[0])

    def cost(self, batch: float) -> StepCost:
        """Return the cost of a step of a batch."""
        return self.costs[0] if self.depth is None else mixed(self.costs, self.depth.place(batch))

    def observation(self, step_s: float, load: Load, place: Place | None) -> tuple[Sums | None, float]:
        """Return what a mean step under a load adds to the sums, None if implausible, and its expected time."""
        prior = self._prior if place is None else numbers(mixed(self.priors, place))
        cost = self.seconds if place is None else numbers(mixed(self.costs, place))
        base, requests, context, prompts = terms(prior, load)
        prior_s, expected_s = base + requests + context + prompts, _sum(terms(cost, load))
        if not _LEAST_RATIO * prior_s <= step_s <= _MOST_RATIO * prior_s:
            return None, expected_s
        ratio = step_s / expected_s if step_s > expected_s else expected_s / step_s
        weight = _OUTLIER / ratio if ratio > _OUTLIER else 1.0  # a stall says little about load
        base, requests, context, prompts = base / prior_s, requests / prior_s, context / prior_s, prompts / prior_s
        seen, by_base, by_requests = weight * step_s / prior_s, weight * base, weight * requests
        by_context = weight * context
        # fmt: off
        sums = (
            1.0, math.log(step_s / prior_s),
            by_base * base, by_base * requests, by_base * context, by_base * prompts,
            by_requests * requests, by_requests * context, by_requests * prompts,
            by_context * context, by_context * prompts, weight * prompts * prompts,
            seen * base, seen * requests, seen * context, seen * prompts,
            min(step_s, _OUTLIER * expected_s), load[0], load[1], load[2],
        )
        # fmt: on
        return sums, expected_s

    def counted(self) -> float | None:
        """Return the tokens per step that its engine has counted since the last call; None while they are few."""
        drafts, accepted = self.drafts[0] - self._counted[0], self.drafts[1] - self._counted[1]
        if 0 <= drafts < _LEAST_COUNTED:
            return None
        self._counted = self.drafts
        if drafts < 0:  # it has restarted
            return None
        return min(1.0 + max(0, accepted) / drafts, self.k + 1.0)

    # The work sent there

    def read(self, candidate: Candidate) -> None:
        """Read a new report of the engine."""
        load = self.load = candidate.load
        self.reach.read(candidate.drafter_limit)
        self.waiting, self.others = load.waiting, load.others
        self.drafts = load.drafts, load.accepted_tokens
        self.prefixes.resize(load.kv_tokens)

    def update(self, now_s: float, requests: int) -> None:
        """Integrate the load up to now, and set the current number of requests."""
        elapsed_s = now_s - self._at_s
        if elapsed_s > 0.0:
            self._request_s += elapsed_s * self.requests
            if self.sent:
                self._context_s += elapsed_s * self.requests * self.context_tokens / self.sent
            self._at_s = now_s
        elif elapsed_s < 0.0:  # the clock was set back
            self._at_s = self._prefill_until_s = self._told_until_s = now_s
        self.requests = requests
        if not requests and self.sent:  # an unreported end must not do lasting harm
            self.sent, self._beyond = 0, {}
            self.steps = self.context_tokens = self.prefill_s = self.undrafted = 0.0

    def send(self, work: Work, now_s: float) -> None:
        """Add a request."""
        work.mark = self._at_s, self._request_s, self._context_s, self._prompt_work, self._heard_s
        self.sent += 1
        self.requests += 1
        self.steps += work.steps
        self.context_tokens += work.context_tokens
        self._prompt_work += work.prompt_work
        self._prefill_until_s = now_s + self.prefill_left_s(now_s) + work.prefill_s
        if self._told_until_s > now_s:
            self._told_until_s = self._prefill_until_s
        self.prefill_s += work.prefill_s
        if work.beyond_from_s < math.inf:
            self.undrafted += work.undrafted
            self._beyond[id(work)] = work

    def hear(self, prefill_s: float, now_s: float) -> None:
        """Add a prompt sent by another gateway."""
        self._heard_s += prefill_s
        self._told_until_s = now_s + self.prefill_left_s(now_s) + prefill_s

    def end(self, work: Work, now_s: float, *, is_beyond: bool) -> None:
        """Remove a request that has ended, beyond the drafter's limit or not."""
        self.update(now_s, self.requests)
        self.requests = max(0, self.requests - 1)
        if self.sent:
            self.sent -= 1
            self.steps = max(0.0, self.steps - work.steps)
            self.context_tokens = max(0.0, self.context_tokens - work.context_tokens)
            self.prefill_s = max(0.0, self.prefill_s - work.prefill_s)
        if is_beyond:
            self._undrafted_at_s = self._at_s
        if self._beyond.pop(id(work), None) is not None:
            self.undrafted = max(0.0, self.undrafted - work.undrafted)

    def prefill_left_s(self, now_s: float) -> float:
        """Return the seconds until the prompts sent there are computed, one after another."""
        own_s = max(0.0, min(self.prefill_s, self._prefill_until_s - now_s))
        return max(own_s, self._told_until_s - now_s)  # when compiled, much faster than one call with all three

    def was_drafted(self, since_s: float) -> bool:
        """Return whether no request can have exceeded the drafter's limit since a time."""
        if self._undrafted_at_s > since_s:
            return False
        return not self._beyond or self._at_s < min([work.beyond_from_s for work in self._beyond.values()])

    def met(self, work: Work, now_s: float, steps: float) -> Load:
        """Return the mean requests, context tokens and prompt work per step that a request met."""
        at_s, request_s, context_s, prompt_work, _ = work.mark
        elapsed_s = max(1e-6, now_s - at_s)
        return (  # the mark may be of an earlier replica of this name
            max(1.0, (self._request_s - request_s) / elapsed_s),
            max(0.0, self._context_s - context_s) / elapsed_s,
            max(0.0, self._prompt_work - prompt_work - work.prompt_work) / steps,
        )

    def heard_s(self, work: Work) -> float:
        """Return the seconds of the prompts of other gateways heard of since a request was sent."""
        return max(0.0, self._heard_s - work.mark[4])

    def place(self, batch: float, k: float | None) -> Place | None:
        """Return the levels between which an answer was drafted, by its mean k if known; None for a fixed k."""
        if self.depth is None:
            return None
        tells = k is not None and not self.has_shadow and not self.depth.adaptive
        return self.depth.place_of_k(k or 0.0) if tells else self.depth.place(batch)

    def per_step(self, by_k: Sequence[float], excess: float, batch: float, accepted: float = 1.0) -> float:
        """Return the tokens per step in a batch: as expected at its k, plus the excess where k is not 0.

        `accepted` is the share of drafts that are still accepted, by the detector.
        """
        found = self.per_step_at(by_k, excess, None if self.depth is None else self.depth.place(batch))
        return found if accepted == 1.0 else 1.0 + accepted * (found - 1.0)

    def per_step_at(self, by_k: Sequence[float], excess: float, place: Place | None) -> float:
        """Return the tokens per step at a place of its depth, None for a fixed k."""
        if self.depth is None or place is None:
            log = by_k[-1] + excess
            return math.exp(min(log, self._most)) if log > 0.0 else 1.0
        values = [math.exp(min(max(0.0, by_k[k] + excess), self._most)) if k else 1.0 for k in self.depth.levels]
        return between(values, place)

    def without_s(
        self, batch: int, requests: int, by_k: Sequence[float], excess: float, accepted: float, per_step: float
    ) -> float:
        """Return the seconds that the requests there would need without one more, for the tokens of a step with it."""
        cost = self.cost(batch)
        context_s = cost.per_context_token_s * self.context_tokens / self.sent
        before = self.per_step(by_k, excess, batch, accepted)
        return per_step / before * (cost.base_s + requests * (cost.per_request_s + context_s))

    def expected(self, text: Text) -> tuple[float, ...]:
        """Return the calibration's logarithm of the tokens per step for a text, at each k."""
        found = self._expected.get(text)
        if found is None:  # when compiled, its own table is faster than a cached function
            found = self._expected[text] = expected_of(self._calibration, self.method, self.k, text)
        return found

    def excess(self, by_k: Sequence[float], per_step: float, place: Place | None) -> tuple[float, float]:
        """Return by how much an answer's log(tokens per step) exceeds the expectation, and its weight."""
        log = math.log(max(1.0, per_step))
        if self.depth is None or place is None:
            return log - by_k[-1], 1.0
        levels = self.depth.levels
        drafted = between([1.0 if k else 0.0 for k in levels], place)
        if drafted < _LEAST_DRAFTED:
            return 0.0, 0.0
        expected = math.log(between([math.exp(by_k[k]) for k in levels], place))
        return (log - expected) / drafted, drafted


def numbers(cost: StepCost) -> Factors:
    """Return the four numbers of a cost."""
    base_s, per_request_s, per_context_token_s, per_prompt_token_s = cost
    return base_s, per_request_s, per_context_token_s, per_prompt_token_s


def _sum(numbers: Factors) -> float:
    return numbers[0] + numbers[1] + numbers[2] + numbers[3]


def terms(cost: Factors, load: Load) -> Factors:
    """Return the seconds of a step under a load: its base, requests, their context, and prompts."""
    requests, context_tokens, prompt_work = load
    base_s, per_request_s, per_context_token_s, per_prompt_token_s = cost
    return base_s, per_request_s * requests, per_context_token_s * context_tokens, per_prompt_token_s * prompt_work


def fit_factors(buckets: Mapping[Key, Sums]) -> dict[str, tuple[Factors, float]]:
    """Return the factors of each replica and the number of its answers: a ridge regression towards the pool's factor.

    The pool's factor is the median of the replicas' own, so that no single one makes all look faster or slower.
    """
    known = possible(buckets)
    logs = mean_logs(known)
    usual = math.exp(median(logs.values())) if logs else 1.0
    return {name: (_fit(sums, usual), sums[0]) for name, sums in known.items()} | {"": ((usual,) * 4, 0.0)}


def mean_logs(known: Mapping[str, Sums]) -> dict[str, float]:
    """Return the mean log(observed / calibration) of each replica's steps."""
    return {name: sums[1] / (sums[0] + 1.0) for name, sums in known.items()}


def possible(buckets: Mapping[Key, Sums]) -> dict[str, Sums]:
    """Return the sums of each replica that are plausible."""
    return {
        key[0]: sums
        for key, sums in buckets.items()
        if sums[0] > 0.0 and min(sums[2:]) >= 0.0 and _LEAST_LOG <= sums[1] / sums[0] <= _MOST_LOG
    }


def met_by(sums: Sums) -> tuple[float, Load]:
    """Return the mean seconds of a step, and the mean load, met by the answers of a replica."""
    seconds, requests, context_tokens, prompt_work = [each / sums[0] for each in sums[_MET:]]
    return seconds, (requests, context_tokens, prompt_work)


def _fit(sums: Sums, usual: float) -> Factors:
    """Return factors, fixing any below a hundredth of the usual at that, one after another."""
    matrix = [[0.0] * 4 for _ in range(4)]
    for (row, column), value in zip(_PAIRS, sums[2:12], strict=True):
        matrix[row][column] = matrix[column][row] = value
    for row in range(4):
        matrix[row][row] += _RIDGE
    right, least = [value + _RIDGE * usual for value in sums[12:_MET]], 0.01 * usual
    fixed: list[int] = []
    while True:
        free = [row for row in range(4) if row not in fixed]
        found = [least] * 4
        known = [right[row] - sum(matrix[row][column] * least for column in fixed) for row in free]
        for row, value in zip(
            free, _solve([[matrix[row][column] for column in free] for row in free], known), strict=True
        ):
            found[row] = value
        lowest = min(range(4), key=found.__getitem__)
        if found[lowest] >= least or len(fixed) == 3:
            return found[0], found[1], found[2], found[3]
        fixed.append(lowest)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return the solution of a positive definite system, by Gaussian elimination."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            right[row] -= factor * right[pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
    for row in range(size - 1, -1, -1):
        rest = sum(matrix[row][column] * right[column] for column in range(row + 1, size))
        right[row] = (right[row] - rest) / matrix[row][row]
    return right


_MET: Final = 16
_PAIRS: Final = tuple((row, column) for row in range(4) for column in range(row, 4))
_RIDGE: Final = 0.09
"""Square of the ratio of answers' deviation from the fit (15%) to factors' deviation from the usual one (50%)."""
_OUTLIER: Final = 3.0
_LEAST_RATIO, _MOST_RATIO = 0.01, 1000.0
_LEAST_LOG, _MOST_LOG = math.log(_LEAST_RATIO), math.log(_MOST_RATIO)
_LONG_PROMPT: Final = 2048.0
"""Prompt tokens from which prefill dominates the time to the first token."""
_MOST_PROMPTS: Final = 50.0
_MOST_ERROR: Final = math.log(3.0)
_LEAST_COUNTED: Final = 50
"""Drafts between two readings of an engine's counters from which their mean is a lesson."""
_LEAST_DRAFTED: Final = 0.1
