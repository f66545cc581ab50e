"""The beliefs of `learned`, for people: the speedup of each backend by kind of request, and its current step time."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backends.backend import Candidate
from backends.speculation import Method
from policies.features.request import TYPICAL_TOKENS
from policies.learned.known import Known
from policies.learned.policy import Learned
from policies.learned.prior import expected_by_k
from policies.learned.replica import KnownReplica, terms
from policies.learned.table import TEMPERATURES, answers_of, is_kind, nested, typical, without_client
from policies.statistics import Key

MOST_GROUPS: Final = 24
SPREAD: Final = 0.25
"""Standard deviation of log(tokens per step) between similar requests, in recorded acceptance."""


@dataclass(frozen=True, slots=True)
class GroupBelief:
    """The expectations of one backend for a group of requests."""

    backend: str
    speedup: float  # output tokens per second relative to the baseline, at the same load
    tokens_per_step: float  # expected
    # Geometric mean of the observed ones, scaled to the maximum k; None without any.
    observed_tokens_per_step: float | None
    requests: float  # requests of the group observed on its method and k, shadow drafts included, discounted by age
    sent: float  # those of the group that it answered itself


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one workload, template and temperature."""

    workload: str  # as declared in the header `x-gateway-workload`; empty without it
    # Eight hex digits that requests of one application share; empty for requests without one, and for all rare
    # templates together.
    template: str
    temperature: str  # range of the temperature, such as `0.5-0.9`
    requests: float  # observations of the group on all backends, shadow drafts included, discounted by age
    backends: list[GroupBelief]


@dataclass(frozen=True, slots=True)
class Belief:
    """The expectations of the backends of a model."""

    baseline: str  # the reference of speedups: the first backend without speculation, else the first
    batch: float  # requests on each backend at which speedups hold
    groups: list[RequestGroup]  # the groups with the most requests, largest first


def belief_of(learned: Learned, candidates: Sequence[Candidate], batch: float) -> Belief:
    """Return the beliefs of a policy; may be called from another thread, as it changes nothing."""
    known = learned.known
    replicas = {**known.replicas}  # a copy: another thread adds replicas
    present = [replicas[each.name] for each in candidates if each.name in replicas]
    if not present:
        return Belief("", batch, [])
    reference = next((one for one in present if one.method is Method.BASELINE), present[0])
    shown = [item for item in _grouped(known).items() if item[1].requests >= _LEAST_REQUESTS]
    groups = []
    for (workload, template, temperature), group in heapq.nlargest(MOST_GROUPS, shown, lambda item: item[1].requests):
        beliefs = [_of_backend(known, one, group, reference, batch) for one in present]
        groups.append(RequestGroup(workload, template, _temperatures(int(temperature)), group.requests, beliefs))
    return Belief(reference.name, batch, groups)


def present_step_s(replica: KnownReplica, requests: int) -> float:
    """Return a replica's expected step time by the fit, with its current work from this gateway process."""
    batch, sent = max(1, requests), replica.sent
    context_tokens = replica.context_tokens / sent * batch if sent else 0.0
    return sum(terms(replica.cost(batch), (batch, context_tokens, 0.0)))


def tokens_per_step(known: Known, replica: KnownReplica, kind: Key, batch: float) -> float:
    """Return the expected tokens per step of a replica for requests of a kind, see `without_client`."""
    _, accepted = known.detector.effect(replica.name, 0.0)
    excess = known.per_step.mean(replica.arm, nested((*kind, ""))) + replica.apart
    return replica.per_step(_by_k(known, replica, kind), excess, batch, accepted)


class _Observed:
    """The observations of a group: by kind, by arm and kind, and by the backend that answered."""

    def __init__(self) -> None:
        self.requests = 0.0
        self.kinds: defaultdict[Key, float] = defaultdict(float)
        self.arms: defaultdict[str, list[tuple[Key, float, float]]] = defaultdict(list)
        self.sent: defaultdict[str, float] = defaultdict(float)


def _grouped(known: Known) -> dict[Key, _Observed]:
    """Return the observations by workload, template and temperature; rare templates together."""
    rows: list[tuple[str, Key, float, float]] = [
        (key[0], without_client(key[1:]), sums[2], sums[3]) for key, sums in known.per_step.told() if is_kind(key[1:])
    ]
    totals: defaultdict[Key, float] = defaultdict(float)
    for _, kind, count, _ in rows:
        totals[_group(kind)] += count
    groups: defaultdict[Key, _Observed] = defaultdict(_Observed)

    def shown(kind: Key) -> _Observed:
        workload, template, temperature = _group(kind)
        is_rare = totals[workload, template, temperature] < _LEAST_REQUESTS
        return groups[workload, "" if is_rare else template, temperature]

    for arm, kind, count, log in rows:
        group = shown(kind)
        group.requests += count
        group.kinds[kind] += count
        group.arms[arm].append((kind, count, log))
    for name, kind, answers, _ in answers_of(known.statistics):
        group, replica = shown(kind), known.replicas.get(name)
        group.sent[name] += answers
        if replica is not None and not replica.k:  # it drafts nothing to learn from
            group.arms[replica.arm].append((kind, answers, 0.0))
    return groups


def _group(kind: Key) -> Key:
    return typical(kind).workload, kind[2], kind[0].partition("/")[0]


def _of_backend(
    known: Known, replica: KnownReplica, group: _Observed, reference: KnownReplica, batch: float
) -> GroupBelief:
    """Return the expectations of a backend: the mean of logarithms over the most frequent kinds."""
    weights = log_speedup = log_tokens = 0.0
    for kind, weight in heapq.nlargest(_MOST_KINDS, group.kinds.items(), lambda item: item[1]):
        load = batch, batch * (typical(kind).prompt_tokens + TYPICAL_TOKENS / 2), 0.0
        per_step, compared = [tokens_per_step(known, one, kind, batch) for one in (replica, reference)]
        step_s, compared_s = [sum(terms(one.cost(batch), load)) for one in (replica, reference)]
        weights += weight
        log_tokens += weight * math.log(per_step)
        log_speedup += weight * math.log(per_step / compared * compared_s / step_s)
    observed, log = group.arms.get(replica.arm, ()), 0.0
    count = sum([one[1] for one in observed])
    for kind, answers, excess in observed:
        log += excess + answers * _by_k(known, replica, kind)[-1]
    return GroupBelief(
        replica.name,
        math.exp(log_speedup / weights),
        math.exp(log_tokens / weights),
        math.exp(log / count) if count else None,
        count,
        group.sent.get(replica.name, 0.0),
    )


def _by_k(known: Known, replica: KnownReplica, kind: Key) -> tuple[float, ...]:
    """Return the log(tokens per step) of the calibration at each k, for requests of a kind."""
    workload, temperature, prompt_tokens = typical(kind)
    context_tokens = prompt_tokens + TYPICAL_TOKENS / 2
    return expected_by_k(known.calibration, replica.method, replica.k, workload, temperature, context_tokens)


def _temperatures(index: int) -> str:
    """Return a bin of temperatures.

    Examples
    --------
    >>> _temperatures(0), _temperatures(2), _temperatures(3)
    ('0-0.05', '0.5-0.9', '0.9+')
    """
    if index == len(TEMPERATURES):
        return f"{TEMPERATURES[-1]:g}+"
    return f"{TEMPERATURES[index - 1] if index else 0:g}-{TEMPERATURES[index]:g}"


_MOST_KINDS: Final = 12
"""Kinds of a group over which its predictions are averaged: those with the most requests."""
_LEAST_REQUESTS: Final = 20.0
"""Observations below which a group is not shown."""
