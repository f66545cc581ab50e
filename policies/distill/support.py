"""Which rules earn their place: those with enough requests behind them, and a gain that is more than noise.

A rule is compared with what its requests would meet without it: the first of the later rules whose conditions hold.
Both are tried in the same situations, so the gain is paired. Its error is that of a mean over as many requests as were
observed of those that the rule is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.distill.fluid_choice import Floats, Situations
from policies.distill.tree import Group, Indices
from policies.distill.weights import RuleWeights, chosen_by, fit_weights

MIN_REQUESTS: Final = 30.0
"""Observed requests behind a rule, at least."""

MIN_SAVING: Final = 0.0005
"""Share of the cost of all requests that each rule must save: reading it costs something too."""

_ERRORS: Final = 1.28
"""Standard errors by which a saving must exceed nought: 90% confidence, on one side."""


class RuleList:
    """Rules in order, of which those that do not earn their place can be dropped."""

    def __init__(
        self,
        groups: Sequence[Group],
        rows: Floats,
        situations: Situations,
        requests: float,
        targets: Mapping[str, Sequence[int]],
    ) -> None:
        self._situations, self._requests, self._targets = situations, requests, targets
        self._costs_s = situations.costs_s
        numbers = {key: number for number, key in enumerate(dict.fromkeys(situations.keys))}
        self._kinds = np.array([numbers[key] for key in situations.keys])
        self._rules = [self._fitted(group, _matches(group, rows), group.indices) for group in groups]
        self._least_saving = MIN_SAVING * sum(map(self._cost_of, self._rules))

    @property
    def fitted(self) -> list[tuple[Group, RuleWeights]]:
        """The groups that are left, with their weights."""
        return [(rule.group, rule.weights) for rule in self._rules]

    def drop_unearned(self, most_rules: int) -> None:
        """Drop rules one by one, the one that saves least first, until few are left and each earns its place."""
        while len(self._rules) > 1:
            trials = [self._without(index) for index in range(len(self._rules) - 1)]
            unearned = [trial for trial in trials if not trial.is_earned]
            if not unearned and len(self._rules) <= most_rules:
                return
            self._rules = min(unearned or trials, key=lambda trial: trial.saving).rules

    def _fitted(self, group: Group, matches: npt.NDArray[np.bool_], indices: Indices) -> _Rule:
        """Return the rule of a group, with the weights for some situations."""
        weights = fit_weights(self._situations, indices, self._targets)
        chosen = chosen_by(weights, self._situations.requests[indices], self._targets)
        return _Rule(replace(group, indices=indices), matches, weights, chosen)

    def _cost_of(self, rule: _Rule) -> float:
        indices = rule.group.indices
        return float((self._situations.weights[indices] * self._costs_s[indices, rule.chosen]).sum())

    def _without(self, index: int) -> _Trial:
        """Return the rules without one of them, whose requests fall to later ones."""
        dropped, others = self._rules[index], [*self._rules]
        left, before, after = dropped.group.indices, [dropped], []
        for later in range(index + 1, len(others)):
            rule, falls = others[later], others[later].matches[left]
            if falls.any():
                before.append(rule)
                indices = np.concatenate([rule.group.indices, left[falls]])
                others[later] = self._fitted(rule.group, rule.matches, indices)
                after.append(others[later])
                left = left[~falls]
        del others[index]
        saving = sum(map(self._cost_of, after)) - sum(map(self._cost_of, before))
        requests = self._requests * len(dropped.group.indices) / len(self._kinds)
        is_earned = (
            requests >= MIN_REQUESTS
            and saving > self._least_saving
            and saving > _ERRORS * self._spread(before, after) / math.sqrt(requests)
        )
        return _Trial(others, saving, is_earned)

    def _spread(self, before: Sequence[_Rule], after: Sequence[_Rule]) -> float:
        """Return the standard deviation of a saving between kinds of requests, times their number."""
        weights = self._situations.weights
        by_kind = np.zeros(len(self._kinds))
        totals = np.zeros(len(self._kinds))
        for sign, rules in ((-1.0, before), (1.0, after)):
            for rule in rules:
                indices = rule.group.indices
                kinds, weight = self._kinds[indices], weights[indices]
                costs = sign * weight * self._costs_s[indices, rule.chosen]
                by_kind += np.bincount(kinds, costs, len(by_kind))
                if sign > 0:
                    totals += np.bincount(kinds, weight, len(totals))
        seen = totals > 0
        totals, by_kind = totals[seen], by_kind[seen]
        total = float(totals.sum())
        variance = float((totals * (by_kind / totals - by_kind.sum() / total) ** 2).sum()) / total
        return total * math.sqrt(variance)


@dataclass(frozen=True, slots=True)
class _Rule:
    group: Group
    matches: npt.NDArray[np.bool_]
    """Whether its conditions hold in each situation."""
    weights: RuleWeights
    chosen: Indices
    """Backend that it chooses in each situation of its group."""


@dataclass(frozen=True, slots=True)
class _Trial:
    rules: list[_Rule]
    saving: float
    """Cost without the rule less that with it."""
    is_earned: bool


def _matches(group: Group, rows: Floats) -> npt.NDArray[np.bool_]:
    """Return in which rows the conditions of a group hold."""
    holds = np.ones(len(rows), bool)
    for column, bound in group.bounds:
        holds &= rows[:, column] <= bound
    return holds
