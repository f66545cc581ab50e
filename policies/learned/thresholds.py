"""Distills the table into readable form: the methods in order for each kind of request, and rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from backends.backend import Candidate
from policies.arm import arm_of
from policies.features.request import TYPICAL_TOKENS
from policies.learned.cost import weighed
from policies.learned.known import Known
from policies.learned.prior import expected_by_k
from policies.learned.replica import KnownReplica
from policies.learned.table import OVERLAPS, PROMPTS, TEMPERATURES, Groups, is_kind, typical
from policies.rules.policy import Thresholds, ThresholdSettings
from policies.rules.rule import BACKEND, RESERVED

DIMENSIONS: Final[dict[str, tuple[float, ...]]] = {
    "temperature": TEMPERATURES,
    "overlap": OVERLAPS,
    "prompt_tokens": PROMPTS,
}
LEVELS: Final = (1.0, 6.0, 24.0, 80.0)
"""Requests in flight per replica at which choices are compared."""
MOST_RULES: Final = 8
"""Most rules that name workloads, and most that do not."""


_N = TypeVar("_N", float, npt.NDArray[np.float64])
_Loads = Mapping[str, npt.NDArray[np.float64]]
"""Requests in flight on the least loaded replica of each target, in the situations in which choices are compared."""


class Rules(NamedTuple):
    """The rules distilled from the table, and the kind of request of each."""

    settings: ThresholdSettings
    kinds: list[RuleKind]
    matched: list[float]  # observed requests of which each is the first to match

    @property
    def text(self) -> str:
        """The rules as YAML for `policy:` in a pool file, with the basis of each as a comment."""
        requests = sum(self.matched)
        lines = [f"# From {requests:.0f} requests.", f"name: {Thresholds.name}", "rules:"]
        for rule, kind, matched in zip(self.settings.rules, self.kinds, self.matched, strict=True):
            share = matched / max(1e-9, requests)
            lines += [f"  # {share:.0%} of the requests: {kind.in_order()}", *(f"  {line}" for line in rule.lines())]
        return "\n".join(lines) + "\n"


class NothingLearnedError(Exception):
    """Raised if there are no observations or backends from which to make rules."""


class CostLine(NamedTuple):
    """The cost of a request on one target: idle, and per request in flight there, in seconds."""

    idle_s: float
    each_s: float

    def at(self, requests: _N) -> _N:
        """Return the cost next to this many requests."""
        return self.idle_s + self.each_s * requests


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A kind of request: workloads (any if empty), and ranges of the bins of `DIMENSIONS`."""

    workloads: frozenset[str]
    ranges: tuple[tuple[int, int], ...]
    requests: float  # observed, discounted by age
    lines: Mapping[str, CostLine]  # by target

    @property
    def order(self) -> list[str]:
        """The targets, cheapest in an idle pool first."""
        return sorted(self.lines, key=lambda target: self.lines[target].idle_s)

    def has(self, other: RuleKind) -> bool:
        """Return whether all requests of another kind are of this one."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        is_of_workload = not self.workloads or other.workloads <= self.workloads
        return is_of_workload and all(low <= first and last <= high for (low, high), (first, last) in pairs)

    def thresholds(self) -> list[tuple[str, float, float]]:
        """Return the targets in order, each with its threshold in requests in flight on the first, and per second.

        From there, the first costs more than an idle replica of that target.
        """
        first = self.lines[self.order[0]]
        found = []
        for target in self.order:
            requests = max(0.0, self.lines[target].idle_s - first.idle_s) / max(1e-9, first.each_s)
            found.append((target, requests, requests / first.at(requests)))
        return found

    def in_order(self) -> str:
        """Return in words the targets in order, each with the load from which it is cheaper than the first.

        Examples
        --------
        >>> lines = {"baseline": CostLine(1.0, 0.5), "ngram": CostLine(1.1, 0.5)}
        >>> RuleKind(frozenset(), (), 1.0, lines).in_order()
        'baseline, ngram from 1 in flight on one (0.2/s)'
        """
        (first, _, _), *rest = self.thresholds()
        words = [f"{name} from {max(1.0, busy):.0f} in flight on one ({rate:.1f}/s)" for name, busy, rate in rest]
        return ", ".join([first, *words])

    def weights(self) -> tuple[dict[str, float], float]:
        """Return the weights and the slack with which (requests + 1 + slack) / weight best fits the lines."""
        slack = min(_MOST_SLACK, max(1.0, median(one.idle_s / max(1e-9, one.each_s) for one in self.lines.values())))
        scores = [level + slack for level in LEVELS]
        scale = {
            target: sum(line.at(level) * score for level, score in zip(LEVELS, scores, strict=True))
            / sum(score * score for score in scores)
            for target, line in self.lines.items()
        }
        best = min(scale.values())
        order = sorted(scale, key=scale.__getitem__)
        return {target: max(0.01, round(best / scale[target], 2)) for target in order}, round(slack - 1.0)

    def when(self, all_kinds: Iterable[RuleKind]) -> dict[str, Any]:
        """Return the conditions of a rule, except those that all requests of its workloads meet."""
        found: dict[str, Any] = {"workload": sorted(self.workloads)} if self.workloads else {}
        alike = [one for one in all_kinds if not self.workloads or one.workloads & self.workloads]
        for index, (name, bounds) in enumerate(DIMENSIONS.items()):
            low, high = self.ranges[index]
            conditions = []
            if any(one.ranges[index][0] < low for one in alike):
                conditions.append(f">= {bounds[low - 1]:g}")
            if any(one.ranges[index][1] > high for one in alike):
                conditions.append(f"< {bounds[high]:g}")
            if conditions:
                found[name] = " and ".join(conditions)
        return found

    def name(self, when: Mapping[str, Any]) -> str:
        """Return a name for a rule."""
        words = ["-".join(sorted(self.workloads)) or "any"]
        words += [f"{key.partition('_')[0]}-{when[key]}" for key in DIMENSIONS if key in when]
        plain = "-".join(words).replace(">= ", "from-").replace("< ", "to-").replace(" and ", "-")
        return "".join(char if char.isalnum() or char in "-_" else "_" for char in plain.lower())[:40]


def kinds_of(known: Known, candidates: Sequence[Candidate]) -> list[RuleKind]:
    """Return the observed kinds of requests, those with the most requests first."""
    targets = _targets(known, candidates)
    counts: dict[tuple[str, str], float] = {}
    for key, group in [*known.per_step.groups.items()]:  # a copy: another thread adds answers
        if len(key) == _WORKLOADS and is_kind(key):  # other gateways may write any key
            count = max([each.count for each in [*group.means.values()]], default=0.0)
            if count > 0.0:
                counts[key[0], key[1]] = count
    usual: dict[str, tuple[float, float]] = {}  # by target: steps, and seconds per step, of its usual request
    total = sum(counts.values())
    for target, replica in targets.items():
        works = [(_work(known, replica, key), count) for key, count in counts.items()]
        usual[target] = (
            sum(count * one[0] for one, count in works) / max(1e-9, total),
            sum(count * one[1] for one, count in works) / max(1e-9, total),
        )
    kinds = []
    for (bins, workload), count in counts.items():
        lines = {target: _line(known, replica, (bins, workload), usual[target]) for target, replica in targets.items()}
        prompt, _, name = workload.split("/")
        ranges = tuple([(int(each), int(each)) for each in (*bins.split("/"), prompt)])
        kinds.append(RuleKind(frozenset([name]), ranges, count, lines))
    return _alike(kinds)


def in_words(known: Known, candidates: Sequence[Candidate]) -> list[str]:
    """Return a line for each kind of request: its workload, temperature and overlap, and the targets in order."""
    any_prompt = (0, len(PROMPTS))
    kinds = _alike([replace(one, ranges=(*one.ranges[:2], any_prompt)) for one in kinds_of(known, candidates)])
    found = []
    for kind in kinds[:_MOST_SHOWN]:
        parts = [next(iter(kind.workloads)) or "no workload"]
        for (name, bounds), (low, high) in zip(DIMENSIONS.items(), kind.ranges, strict=True):
            if low > 0:
                parts.append(f"{name} from {bounds[low - 1]:g}")
            if high < len(bounds):
                parts.append(f"{name} below {bounds[high]:g}")
        found.append(f"{', '.join(parts)} ({kind.requests:.0f} requests): {kind.in_order()}")
    return found


def rules_of(known: Known, candidates: Sequence[Candidate]) -> Rules:
    """Return the rules distilled from the table."""
    if len(candidates) < 2:
        raise NothingLearnedError("there must be at least two backends to choose between")
    kinds = kinds_of(known, candidates)
    if not kinds:
        raise NothingLearnedError("no request was observed yet")
    loads = _situations(candidates)
    named = _merged([kind for kind in kinds if kind.workloads != {""}], loads)
    unnamed = _merged(_alike([replace(kind, workloads=frozenset()) for kind in kinds]), loads)
    default = _union(unnamed)
    rules, written, used = list[dict[str, Any]](), list[RuleKind](), {_DEFAULT, *RESERVED}
    for group in (named, unnamed):
        for kind in group:
            when = kind.when(group)
            if when:
                name = kind.name(when)
                while name in used:
                    name = f"{name[:37]}-{len(used)}"
                used.add(name)
                weights, slack = kind.weights()
                rules.append({"name": name, "when": when, "weights": weights, "slack": slack})
                written.append(kind)
    weights, slack = default.weights()
    rules.append({"name": _DEFAULT, "weights": weights, "slack": slack})
    written.append(default)
    matched = [0.0] * len(written)
    for kind in kinds:  # those left out are of no rule but the last, which has no conditions
        matched[next((number for number, rule in enumerate(written) if rule.has(kind)), -1)] += kind.requests
    return Rules(ThresholdSettings.model_validate({"rules": rules}), written, matched)


def _targets(known: Known, candidates: Sequence[Candidate]) -> dict[str, KnownReplica]:
    """Return a replica of each target: a method, or a backend if those of the method differ."""
    arms: dict[str, set[str]] = {}
    for one in candidates:
        arms.setdefault(one.method.value, set()).add(arm_of(one))
    found: dict[str, KnownReplica] = {}
    for one in candidates:
        target = one.method.value if len(arms[one.method.value]) == 1 else BACKEND + one.name
        found.setdefault(target, known.replica(one))
    return found


def _work(known: Known, replica: KnownReplica, kind: tuple[str, str], batch: float = 6.0) -> tuple[float, float, float]:
    """Return the steps of a request of a kind, the seconds that it adds to each, and those of its prefill."""
    name, temperature, prompt = typical(kind)
    tokens = TYPICAL_TOKENS * math.exp(known.lengths.mean("", ((), (name,))))
    context = prompt + tokens / 2
    by_k: tuple[float, ...] = (0.0,)
    if replica.k:
        by_k = expected_by_k(known.calibration, replica.method, replica.k, name, temperature, context)
    groups: Groups = ((), kind[:1], kind)
    per_step = replica.per_step(by_k, known.per_step.mean(replica.arm, groups), batch)
    cost = replica.cost(batch)
    prefill_s = replica.prompts.token_s(cost.per_prompt_token_s) * weighed(prompt, 0.0, known.attention)
    return tokens / per_step, cost.per_request_s + cost.per_context_token_s * context, prefill_s


def _line(known: Known, replica: KnownReplica, kind: tuple[str, str], usual: tuple[float, float]) -> CostLine:
    """Return the cost of a request of a kind, next to usual requests there."""
    costs = []
    for level in (LEVELS[0], LEVELS[2]):
        steps, mine_s, prefill_s = _work(known, replica, kind, level + 1.0)
        shared = steps * usual[0] / (steps + usual[0])
        base_s = replica.cost(level + 1.0).base_s
        own_s = (steps + replica.joins) * (base_s + mine_s) + prefill_s
        costs.append(own_s + level * (shared * (mine_s + usual[1]) + prefill_s))
    each_s = max(1e-9, (costs[1] - costs[0]) / (LEVELS[2] - LEVELS[0]))
    return CostLine(max(1e-9, costs[0] - each_s * LEVELS[0]), each_s)


class _Merge(NamedTuple):
    """Kinds that can be merged into one that overlaps no other."""

    parts: list[RuleKind]
    union: RuleKind
    loss: float  # additional cost of their requests


def _merged(kinds: list[RuleKind], loads: _Loads) -> list[RuleKind]:
    """Merge the kinds that lose least together, until each one left is worth its rule.

    If there are too many, those with the fewest requests are left out: the rules of others apply to them too.
    """
    kinds = kinds[:_MOST_KINDS]
    own = {id(kind): _cost([kind], kind, loads) for kind in kinds}
    total, merges = sum(own.values()), dict[tuple[int, int], _Merge]()
    while len(kinds) > 1:
        for one, other in combinations(kinds, 2):
            if (id(one), id(other)) not in merges:
                merges[id(one), id(other)] = _merge([one, other], kinds, loads, own)
        rare = [each for each in merges.values() if min(part.requests for part in each.parts) < _LEAST_REQUESTS]
        best = min(rare or merges.values(), key=lambda each: each.loss)
        if not rare and best.loss > _WORTH * total and len(kinds) <= MOST_RULES:
            break
        union, gone = best.union, {id(part) for part in best.parts}
        kinds = [kind for kind in kinds if id(kind) not in gone] + [union]
        own[id(union)] = _cost([union], union, loads)
        merges = {
            pair: each
            for pair, each in merges.items()
            if gone.isdisjoint(map(id, each.parts)) and not _meet(each.union, union)
        }
    return sorted(kinds, key=lambda kind: -kind.requests)


def _merge(parts: list[RuleKind], kinds: Sequence[RuleKind], loads: _Loads, own: Mapping[int, float]) -> _Merge:
    """Return some kinds as one, including all that it would overlap."""
    union = _union(parts)
    while met := [kind for kind in kinds if _meet(union, kind) and all(kind is not part for part in parts)]:
        parts = parts + met
        union = _union(parts)
    return _Merge(parts, union, _cost(parts, union, loads) - sum(own[id(part)] for part in parts))


def _alike(kinds: Iterable[RuleKind]) -> list[RuleKind]:
    """Return the kinds with those of the same conditions merged, those with the most requests first."""
    found: dict[tuple[Any, ...], list[RuleKind]] = {}
    for kind in kinds:
        found.setdefault((kind.workloads, kind.ranges), []).append(kind)
    return sorted(map(_union, found.values()), key=lambda kind: -kind.requests)


def _meet(one: RuleKind, other: RuleKind) -> bool:
    """Return whether requests can be of both kinds."""
    if one.workloads and not one.workloads & other.workloads:
        return False
    pairs = zip(one.ranges, other.ranges, strict=True)
    return all(first[0] <= second[1] and second[0] <= first[1] for first, second in pairs)


def _union(kinds: Sequence[RuleKind]) -> RuleKind:
    requests, ranges = sum(one.requests for one in kinds), zip(*[one.ranges for one in kinds], strict=True)
    lines = {
        target: CostLine(
            sum(one.requests * one.lines[target].idle_s for one in kinds) / requests,
            sum(one.requests * one.lines[target].each_s for one in kinds) / requests,
        )
        for target in kinds[0].lines
    }
    return RuleKind(
        frozenset().union(*[one.workloads for one in kinds]),
        tuple([(min(low), max(high)) for low, high in (zip(*pairs, strict=True) for pairs in ranges)]),
        requests,
        lines,
    )


def _situations(candidates: Sequence[Candidate]) -> _Loads:
    """Return random loads of the pool, as requests in flight on the least loaded replica of each target."""
    rng, names = Random(0), {one.method.value for one in candidates} | {BACKEND + one.name for one in candidates}
    loads = [[level * rng.uniform(0.3, 1.7) for _ in names] for level in LEVELS for _ in range(12)]
    return dict(zip(sorted(names), np.array(loads).T, strict=True))


def _cost(kinds: Sequence[RuleKind], by: RuleKind, loads: _Loads) -> float:
    """Return the mean cost over loads of the requests of kinds, if the weights of another kind choose."""
    weights, slack = by.weights()
    chosen = np.argmin([(loads[target] + 1.0 + slack) / weight for target, weight in weights.items()], 0)
    costs = [[kind.requests * kind.lines[target].at(loads[target]) for target in weights] for kind in kinds]
    return float(np.choose(chosen, np.sum(costs, 0)).mean())


_DEFAULT: Final = "default"
_WORKLOADS: Final = 2
"""Length of the key of a workload's group."""
_MOST_SHOWN: Final = 24
_MOST_KINDS: Final = 48
"""Most kinds from which rules are made, in each of two rounds: more would take minutes."""
_MOST_SLACK: Final = 1000.0
_WORTH: Final = 0.001
"""Share of the total cost that each rule must save, since it costs readers something too."""
_LEAST_REQUESTS: Final = 30.0
