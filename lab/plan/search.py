"""Searches for the mix that serves some windows of the traffic best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from backends.speculation import Method
from lab.plan.mixes import Mix, ReplicaKind, is_coherent, mixes, neighbours
from lab.plan.result import PlanObjective
from lab.plan.runner import MixTask, RunAll

_BEST = 3
_FINALISTS = 4
_GIVEN_UP = 0.05
_PER_METHOD = 2


@dataclass(frozen=True, slots=True)
class Split:
    """The use of each window, as indices: the first to learn, a third to search, the others to judge."""

    learning: tuple[int, ...]
    searched: tuple[int, ...]
    judged: tuple[int, ...]

    @classmethod
    def of(cls, windows: int) -> Split:
        """Split windows.

        Examples
        --------
        >>> Split.of(8)
        Split(learning=(0,), searched=(1, 4, 7), judged=(2, 3, 5, 6))
        """
        if windows < 2:
            raise ValueError("at least two windows of traffic are needed, for the search and for the judgement")
        learning = (0,) if windows > _BEST else ()
        rest = range(len(learning), windows)
        return cls(learning, tuple(rest[::3]), tuple(number for at, number in enumerate(rest) if at % 3))

    @property
    def quick(self) -> tuple[int, ...]:
        """The windows that rule out most mixes: a third of those searched."""
        return self.searched[::3]


@dataclass(frozen=True, slots=True)
class Found:
    """The mixes to judge, the best of the search first."""

    finalists: tuple[Mix, ...]
    tried: int


def find_mixes(
    kinds: Sequence[ReplicaKind],
    usable: Sequence[int],
    replicas: int,
    split: Split,
    run_all: RunAll,
    objective: PlanObjective,
    *,
    present: Mix | None = None,
    budget: int = 200,
) -> Found:
    """Search for the best mixes.

    Tries all mixes of one kind first. If there are more mixes than `budget`, it keeps only each method's best two
    kinds, and tries two kinds in halves. It then changes one replica or all of one kind in the best few until no new
    mix is better. It drops a mix that is more than 5% worse than the best on a third of the windows.
    """
    if not usable:
        raise ValueError("no kind of replica fits into memory")
    tried = _Tried(split, run_all, objective)
    methods = {index: kinds[index].method for index in usable}
    tried.add([(kind,) * replicas for kind in usable])
    some = list(islice(mixes(methods, replicas), budget + 1))
    if len(some) <= budget:
        tried.add(some)
    else:
        kept = {index: methods[index] for index in _best_of_each_method(methods, tried.quick, replicas)}
        first, second = replicas // 2, replicas - replicas // 2
        halves = [tuple(sorted((one,) * first + (other,) * second)) for one in kept for other in kept]
        tried.add([mix for mix in halves if is_coherent(mix, kept)])
        _climb(tried, kept, budget)
    ranked = tried.ranked()
    if math.isinf(tried.cost(ranked[0])):
        raise ValueError(
            "no mix tried serves all requests: those with min_p, logit_bias or logprob_token_ids need a baseline"
        )
    alike = [mix for mix in ranked if len(set(mix)) == 1]
    mixed = next((mix for mix in ranked if len(set(mix)) > 1), None)
    of_method = {methods[mix[0]]: mix for mix in reversed(alike)}
    members = {index for mix in (ranked[0], mixed or ()) for index in mix}
    compared = [*ranked[:_FINALISTS], *of_method.values(), *((index,) * replicas for index in sorted(members))]
    compared += [mix for mix in (mixed, present) if mix is not None]
    return Found(tuple(dict.fromkeys(compared)), len(tried.quick))


class _Tried:
    """The costs of mixes tried: of all mixes on a few windows, of good ones on all windows searched."""

    def __init__(self, split: Split, run_all: RunAll, objective: PlanObjective) -> None:
        self._split, self._run_all, self._objective = split, run_all, objective
        self.quick: dict[Mix, float] = {}
        self.full: dict[Mix, float] = {}

    def add(self, candidates: Sequence[Mix]) -> None:
        """Try mixes that have not been tried yet."""
        new = [mix for mix in dict.fromkeys(candidates) if mix not in self.quick]
        self._play(new, self._split.quick, self.quick)
        best = min(self.quick.values())
        good = [mix for mix in new if self.quick[mix] <= best + _GIVEN_UP * abs(best)]
        if self._split.quick == self._split.searched:
            self.full.update({mix: self.quick[mix] for mix in good})
        else:
            self._play(good, self._split.searched, self.full)

    def cost(self, mix: Mix) -> float:
        """Return the cost on all windows searched, else on a few."""
        return self.full.get(mix, self.quick[mix])

    def ranked(self) -> list[Mix]:
        """Return all mixes, best first; dropped ones come last."""
        return sorted(self.quick, key=lambda mix: (mix not in self.full, self.cost(mix), mix))

    def _play(self, new: Sequence[Mix], windows: tuple[int, ...], costs: dict[Mix, float]) -> None:
        results = self._run_all([MixTask(mix, windows, self._split.learning, 0) for mix in new])
        costs.update({mix: self._objective.cost(played) for mix, played in zip(new, results, strict=True)})


def _best_of_each_method(methods: Mapping[int, Method], costs: Mapping[Mix, float], replicas: int) -> list[int]:
    """Return the best two kinds of each method, judged by mixes of one kind."""
    kept: list[int] = []
    for index in sorted(methods, key=lambda kind: (costs[(kind,) * replicas], kind)):
        if sum(methods[other] is methods[index] for other in kept) < _PER_METHOD:
            kept.append(index)
    return sorted(kept)


def _climb(tried: _Tried, kept: Mapping[int, Method], budget: int) -> None:
    expanded: set[Mix] = set()
    while len(tried.quick) < budget:
        of_kept = [mix for mix in tried.ranked() if set(mix) <= set(kept)]
        best = [mix for mix in of_kept[:_BEST] if mix not in expanded]
        if not best:
            return
        expanded.update(best)
        tried.add([other for mix in best for other in neighbours(mix, kept)])
