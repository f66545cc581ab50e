"""A small tree of conditions, each of whose leaves becomes a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.distill.columns import Column
from policies.distill.fluid_choice import Floats, Situations

Indices = npt.NDArray[np.int64]

_MOST_LEAVES = 24
"""Leaves that are grown; most of them do not earn a rule of their own (`RuleList`)."""

_MIN_LEAF_SHARE = 0.003
"""Minimum share of the total weight in a leaf; small, because a few long answers may be worth a rule."""

_NAMED_FIRST = ("workload", "template")
"""Features that come first in a rule's name, for which there is not always room."""

_NAME_CHARS = 36

_TYPICAL_REQUESTS = 12.0
"""Requests on a backend at which the tree compares costs per request with costs on an idle backend."""


@dataclass(frozen=True, slots=True)
class Group:
    """The requests that meet `when` and none of the conditions of earlier groups."""

    name: str  # made of the conditions; see `unique_names`
    when: dict[str, Any]  # conditions by feature
    bounds: tuple[tuple[int, int], ...]  # the same conditions as (column, highest value)
    indices: Indices  # indices of the situations in the group


def grow(columns: Sequence[Column], rows: Floats, situations: Situations) -> list[Group]:
    """Return the leaves of a regression tree over the situations, which splits where their costs differ."""
    from sklearn.tree import DecisionTreeRegressor  # takes a second to import

    means = situations.idle_s.mean(axis=1)
    tree = DecisionTreeRegressor(max_leaf_nodes=_MOST_LEAVES, min_weight_fraction_leaf=_MIN_LEAF_SHARE, random_state=0)
    # Costs relative to the situation's mean, weighted by that mean: a leaf's mean is still that of seconds, but long
    # answers do not dominate the choice of splits.
    profile = np.hstack([situations.idle_s, _TYPICAL_REQUESTS * situations.each_s]) / means[:, None]
    tree.fit(rows, profile, sample_weight=situations.weights * means)
    return _groups(tree.tree_, columns, rows)


def mean_costs(situations: Situations, indices: Indices) -> tuple[Floats, Floats]:
    """Return the mean cost on each idle backend, and the mean increase per request, weighted by the requests there."""
    weights = situations.weights[indices, None]
    load = weights * (situations.requests[indices] + 0.5)
    idle_s = (weights * situations.idle_s[indices]).sum(axis=0) / weights.sum()
    each_s = (load * situations.each_s[indices]).sum(axis=0) / load.sum(axis=0)
    return idle_s, each_s


def _groups(tree: Any, columns: Sequence[Column], rows: Floats) -> list[Group]:
    groups: list[Group] = []

    def walk(node: int, path: dict[str, tuple[Any, str]], bounds: tuple[tuple[int, int], ...], inside: Indices) -> None:
        lower, upper = int(tree.children_left[node]), int(tree.children_right[node])
        if lower < 0:
            features = sorted(path, key=lambda feature: feature not in _NAMED_FIRST)
            name = _name([path[feature][1] for feature in features])
            when = {feature: condition for feature, (condition, _) in path.items()}
            groups.append(Group(name, when, bounds, inside))
            return
        number, bound = int(tree.feature[node]), int(tree.threshold[node])
        column, is_low = columns[number], rows[inside, number] <= bound
        split = column.conditions[bound], column.labels[bound]
        walk(lower, path | {column.feature: split}, (*bounds, (number, bound)), inside[is_low])
        walk(upper, path, bounds, inside[~is_low])

    walk(0, {}, (), np.arange(len(rows)))
    return groups


def unique_names(groups: Sequence[Group]) -> list[str]:
    """Return the names of groups as rules have them, those after the first of a name with a number."""
    names: list[str] = []
    for group in groups:
        name, number = group.name, 1
        while name in names:
            number += 1
            name = f"{group.name}-{number}"
        names.append(name)
    return names


def _name(labels: Sequence[str]) -> str:
    """Return as many of the labels as a rule's name has room for, with a number after it."""
    name = ""
    for label in labels:
        longer = f"{name}-{label}" if name else label[:_NAME_CHARS].rstrip("-_")
        if len(longer) <= _NAME_CHARS:
            name = longer
    return name or "default"
