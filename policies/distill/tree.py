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

_GROWTH_FACTOR = 8
"""How many times more leaves than allowed are grown before pruning."""

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


def grow(columns: Sequence[Column], rows: Floats, situations: Situations, max_leaves: int) -> list[Group]:
    """Return the leaves of a pruned regression tree over the situations.

    A large tree (scikit-learn's) splits where costs differ. It is then pruned by weakest links [1]_, until it is small
    enough and each split saves enough. The cost of a leaf is that of treating its requests alike: each goes to the
    backend that is best for the leaf's mean costs, not for its own.

    References
    ----------
    .. [1] Breiman, Friedman, Olshen and Stone, "Classification and Regression Trees", Wadsworth, 1984.
    """
    from sklearn.tree import DecisionTreeRegressor  # takes a second to import

    means = situations.idle_s.mean(axis=1)
    tree = DecisionTreeRegressor(
        max_leaf_nodes=_GROWTH_FACTOR * max_leaves, min_weight_fraction_leaf=_MIN_LEAF_SHARE, random_state=0
    )
    # Costs relative to the situation's mean, weighted by that mean: a leaf's mean is still that of seconds, but long
    # answers do not dominate the choice of splits.
    profile = np.hstack([situations.idle_s, _TYPICAL_REQUESTS * situations.each_s]) / means[:, None]
    tree.fit(rows, profile, sample_weight=situations.weights * means)
    root = _node(tree.tree_, 0, np.arange(len(rows)), rows, situations)
    _prune(root, max_leaves, _min_saving(situations, root.cost))
    return _groups(root, columns)


def mean_costs(situations: Situations, indices: Indices) -> tuple[Floats, Floats]:
    """Return the mean cost on each idle backend, and the mean increase per request, weighted by the requests there."""
    weights = situations.weights[indices, None]
    load = weights * (situations.requests[indices] + 0.5)
    idle_s = (weights * situations.idle_s[indices]).sum(axis=0) / weights.sum()
    each_s = (load * situations.each_s[indices]).sum(axis=0) / load.sum(axis=0)
    return idle_s, each_s


@dataclass(slots=True)
class _Node:
    indices: Indices
    cost: float
    """Cost of the node's requests if it were a leaf."""
    column: int = -1
    bound: int = 0
    children: tuple[_Node, _Node] | None = None


def _node(tree: Any, number: int, indices: Indices, rows: Floats, situations: Situations) -> _Node:
    node = _Node(indices, _cost(situations, indices))
    if tree.children_left[number] >= 0:
        node.column, threshold = int(tree.feature[number]), float(tree.threshold[number])
        node.bound = int(np.floor(threshold))
        low = rows[indices, node.column] <= threshold
        node.children = (
            _node(tree, tree.children_left[number], indices[low], rows, situations),
            _node(tree, tree.children_right[number], indices[~low], rows, situations),
        )
    return node


def _cost(situations: Situations, indices: Indices) -> float:
    idle_s, each_s = mean_costs(situations, indices)
    requests = situations.requests[indices]
    chosen = (idle_s + each_s * requests).argmin(axis=1)
    at = indices, chosen
    costs = situations.idle_s[at] + situations.each_s[at] * situations.requests[at]
    return float((situations.weights[indices] * costs).sum())


def _min_saving(situations: Situations, cost: float) -> float:
    """Return the saving that justifies a condition: a thousandth of the largest possible saving."""
    lowest = float((situations.weights * situations.costs_s.min(axis=1)).sum())
    return 0.001 * max(0.0, cost - lowest)


def _prune(root: _Node, max_leaves: int, min_saving: float) -> None:
    while (count := _count(root)) > 1:
        saving, weakest = min((_saving(node), index, node) for index, node in enumerate(_forks(root)))[::2]
        if count <= max_leaves and saving > min_saving:
            return
        weakest.children = None


def _saving(node: _Node) -> float:
    """Return the saving of the splits below a node, per additional leaf."""
    return (node.cost - _leaf_cost(node)) / (_count(node) - 1)


def _leaf_cost(node: _Node) -> float:
    return node.cost if node.children is None else sum(map(_leaf_cost, node.children))


def _count(node: _Node) -> int:
    return 1 if node.children is None else sum(map(_count, node.children))


def _forks(node: _Node) -> list[_Node]:
    return [] if node.children is None else [node, *_forks(node.children[0]), *_forks(node.children[1])]


def _groups(root: _Node, columns: Sequence[Column]) -> list[Group]:
    groups: list[Group] = []

    def walk(node: _Node, path: dict[str, tuple[Any, str]], bounds: tuple[tuple[int, int], ...]) -> None:
        if node.children is not None:
            column = columns[node.column]
            split = column.conditions[node.bound], column.labels[node.bound]
            walk(node.children[0], path | {column.feature: split}, (*bounds, (node.column, node.bound)))
            walk(node.children[1], path, bounds)
            return
        features = sorted(path, key=lambda feature: feature not in _NAMED_FIRST)
        name = _name([path[feature][1] for feature in features])
        when = {feature: condition for feature, (condition, _) in path.items()}
        groups.append(Group(name, when, bounds, node.indices))

    walk(root, {}, ())
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
