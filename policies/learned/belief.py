"""What `learned` believes, for people: the speedup of each backend by kind of request, and its present step time."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from backends.backend import Candidate
from backends.speculation import Method
from policies.features.request import TYPICAL_TOKENS
from policies.learned.models import step_time
from policies.learned.models.acceptance import ACCEPTANCE, ARM, BACKEND
from policies.learned.models.backend_model import BackendModel
from policies.learned.models.keys import TEMPERATURE, TEMPERATURES, TEMPLATE, WORKLOAD, Key, typical_prompt_tokens
from policies.learned.policy import Learned
from policies.statistics import Sums

MOST_GROUPS: Final = 24
_MOST_KEYS: Final = 12
"""Buckets of a group that its predictions are averaged over: those with the most requests."""
_LEAST_REQUESTS: Final = 20.0
"""Observations below which a group is not shown."""


@dataclass(frozen=True, slots=True)
class GroupBelief:
    """What is expected of one backend for a group of requests."""

    backend: str
    speedup: float  # output tokens per second relative to the baseline, at the same load
    tokens_per_step: float  # expected by the fit
    # Geometric mean of those observed, as they would have been at the maximum k; None without any.
    observed_tokens_per_step: float | None
    requests: float  # requests of the group observed on its method and k, shadow drafts included, discounted by age
    sent: float  # those of them that it answered itself


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one workload, template and temperature."""

    workload: str  # as declared in the header `x-gateway-workload`; empty if it was not
    # Eight hex digits that requests of one application share; empty for requests without one, and for all templates
    # with few requests together.
    template: str
    temperature: str  # range of the temperature, such as `0.35-0.65`
    requests: float  # observations of the group on all backends, shadow drafts included, discounted by age
    backends: list[GroupBelief]


@dataclass(frozen=True, slots=True)
class Belief:
    """What is expected of the backends of a model."""

    baseline: str  # the backend that speedups are relative to: the first without speculation, else the first
    batch: float  # requests on each backend at which speedups hold
    groups: list[Group]  # the groups with the most requests, the largest first


def belief_of(learned: Learned, candidates: Sequence[Candidate], batch: float) -> Belief:
    """Return what a policy believes; may be called from another thread, as it changes nothing."""
    models = dict(learned.predictor.backend_models)
    present = [models[each.name] for each in candidates if each.name in models]
    if not present:
        return Belief("", batch, [])
    baselines = [each.name for each in candidates if each.method is Method.BASELINE and each.name in models]
    reference = models[baselines[0]] if baselines else present[0]
    groups = _grouped(learned.statistics.buckets(ACCEPTANCE))
    shown = (item for item in groups.items() if item[1].requests >= _LEAST_REQUESTS)
    largest = heapq.nlargest(MOST_GROUPS, shown, lambda item: item[1].requests)
    return Belief(
        reference.name,
        batch,
        [
            Group(
                key[0],
                key[1],
                _temperatures(int(key[2])),
                group.requests,
                [_of_backend(model, group, reference, batch) for model in present],
            )
            for key, group in largest
        ],
    )


def present_step_s(model: BackendModel, requests: int) -> float:
    """Return the step time that the fit expects of a backend, with the work that it has of this gateway process."""
    backlog = model.backlog
    context_tokens = backlog.context_tokens / backlog.sent * requests if backlog.sent else 0.0
    cost = model.cost_at(model.place(max(1, requests)))
    return step_time.seconds(cost, step_time.terms(max(1, requests), context_tokens, 0.0))


class _Observed:
    """The observations of a group: by bucket, by arm, and by the backend that answered."""

    def __init__(self) -> None:
        self.requests = 0.0
        self.keys: defaultdict[Key, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.logs: defaultdict[str, float] = defaultdict(float)
        self.sent: defaultdict[str, float] = defaultdict(float)

    def add(self, arm: str, backend: str, key: Key, sums: Sums) -> None:
        self.requests += sums[0]
        self.keys[key] += sums[0]
        self.counts[arm] += sums[0]
        self.logs[arm] += sums[1]
        self.sent[backend] += sums[0]


def _grouped(buckets: Mapping[Key, Sums]) -> dict[Key, _Observed]:
    """Return the observations by workload, template and temperature; rare templates together."""
    totals: defaultdict[Key, float] = defaultdict(float)
    for key, sums in buckets.items():
        totals[_group(key)] += sums[0]
    groups: defaultdict[Key, _Observed] = defaultdict(_Observed)
    for key, sums in buckets.items():
        group = _group(key)
        if totals[group] < _LEAST_REQUESTS:
            group = group[0], "", group[2]
        groups[group].add(key[ARM], key[BACKEND], key[BACKEND + 1 :], sums)
    return groups


def _group(key: Key) -> Key:
    request = key[BACKEND + 1 :]
    return request[WORKLOAD], request[TEMPLATE], request[TEMPERATURE]


def _of_backend(model: BackendModel, group: _Observed, reference: BackendModel, batch: float) -> GroupBelief:
    """Return what is expected of a backend: the mean over the most frequent buckets, of logarithms."""
    weights = log_speedup = log_tokens = 0.0
    place, compared = model.place(batch), reference.place(batch)
    cost, reference_cost = model.cost_at(place), reference.cost_at(compared)
    for key, weight in heapq.nlargest(_MOST_KEYS, group.keys.items(), lambda item: item[1]):
        context_tokens = typical_prompt_tokens(key) + TYPICAL_TOKENS / 2
        load = step_time.terms(batch, batch * context_tokens, 0.0)
        per_step = model.tokens_per_step(key, place)
        weights += weight
        log_tokens += weight * math.log(per_step)
        gained = per_step / reference.tokens_per_step(key, compared)
        log_speedup += weight * math.log(gained * step_time.seconds(reference_cost, load))
        log_speedup -= weight * math.log(step_time.seconds(cost, load))
    count = group.counts[model.arm]
    return GroupBelief(
        model.name,
        math.exp(log_speedup / weights),
        math.exp(log_tokens / weights),
        math.exp(group.logs[model.arm] / count) if count else None,
        count,
        group.sent[model.name],
    )


def _temperatures(index: int) -> str:
    """Return a bin of temperatures.

    Examples
    --------
    >>> _temperatures(0), _temperatures(2), _temperatures(5)
    ('0-0.05', '0.35-0.65', '1.05+')
    """
    if index == len(TEMPERATURES):
        return f"{TEMPERATURES[-1]:g}+"
    return f"{TEMPERATURES[index - 1] if index else 0:g}-{TEMPERATURES[index]:g}"
