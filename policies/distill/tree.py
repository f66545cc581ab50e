"""A small tree of conditions, whose leaves are requests for which the same weights do, written as rules in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.distill.columns import Column
from policies.distill.fluid_choice import Floats, Situations

Places = npt.NDArray[np.int64]

_RICHER = 8
"""Times as many leaves as are allowed are grown, and then joined."""

_LEAST_SHARE = 0.003
"""Of the situations' weight, in a leaf: a few long answers may be worth a rule of their own."""

_SAY_MOST = ("workload", "template")
"""Stand first in a rule's name, which is cut where it is too long."""

_USUAL_REQUESTS = 12.0
"""On a backend: how much the cost of those there counts beside that of an idle backend, where the tree splits."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that meet `when` and none of the conditions of the groups before.

    Parameters
    ----------
    name
        Made of the conditions.
    places
        Of its situations.
    """

    name: str
    when: dict[str, Any]
    places: Places


def grow(columns: Sequence[Column], rows: Floats, situations: Situations, most: int) -> list[Group]:
    """Return the leaves of a tree in which little is lost by treating all requests of a leaf alike.

    A regression tree (scikit-learn's) finds where costs differ, idle and with each request there. Then leaves are
    joined, those first that lose least by it, until there are few enough and each that is left is worth having. What is
    lost is counted in cost: of the backend that is best on the average of the leaf, against the best for the request.

    Parameters
    ----------
    rows
        What is asked of each situation; shape (situations, columns).
    most
        Leaves.
    """
    from sklearn.tree import DecisionTreeRegressor  # here, for it takes a second to import

    means = situations.idle_s.mean(axis=1)
    tree = DecisionTreeRegressor(max_leaf_nodes=_RICHER * most, min_weight_fraction_leaf=_LEAST_SHARE, random_state=0)
    # A relative cost with the mean's weight: the mean over a leaf is then that of seconds, without long answers
    # deciding alone where to split.
    profile = np.hstack([situations.idle_s, _USUAL_REQUESTS * situations.each_s]) / means[:, None]
    tree.fit(rows, profile, sample_weight=situations.weights * means)
    root = _node(tree.tree_, 0, np.arange(len(rows)), rows, situations)
    _prune(root, most, _worth_having(situations, root.cost))
    return _groups(root, columns)


def mean_costs(situations: Situations, places: Places) -> tuple[Floats, Floats]:
    """Return mean cost on each idle backend and with each request there, as they count where there are requests."""
    weights = situations.weights[places, None]
    there = weights * (situations.requests[places] + 0.5)
    idle_s = (weights * situations.idle_s[places]).sum(axis=0) / weights.sum()
    each_s = (there * situations.each_s[places]).sum(axis=0) / there.sum(axis=0)
    return idle_s, each_s


@dataclass(slots=True)
class _Node:
    places: Places
    cost: float
    """Of its requests, if one estimate served them all."""
    column: int = -1
    bound: int = 0
    children: tuple[_Node, _Node] | None = None


def _node(tree: Any, number: int, places: Places, rows: Floats, situations: Situations) -> _Node:
    node = _Node(places, _cost(situations, places))
    if tree.children_left[number] >= 0:
        node.column, threshold = int(tree.feature[number]), float(tree.threshold[number])
        node.bound = int(np.floor(threshold))
        low = rows[places, node.column] <= threshold
        node.children = (
            _node(tree, tree.children_left[number], places[low], rows, situations),
            _node(tree, tree.children_right[number], places[~low], rows, situations),
        )
    return node


def _cost(situations: Situations, places: Places) -> float:
    idle_s, each_s = mean_costs(situations, places)
    chosen = (idle_s + each_s * situations.requests[places]).argmin(axis=1)
    costs = situations.idle_s[places, chosen] + situations.each_s[places, chosen] * situations.requests[places, chosen]
    return float((situations.weights[places] * costs).sum())


def _worth_having(situations: Situations, cost: float) -> float:
    """Return the saving from which on a condition is worth reading: a thousandth of what there is to save."""
    least = float((situations.weights * situations.costs_s.min(axis=1)).sum())
    return 0.001 * max(0.0, cost - least)


def _prune(root: _Node, most: int, least_saving: float) -> None:
    while (count := _count(root)) > 1:
        saving, weakest = min((_saving(node), place, node) for place, node in enumerate(_forks(root)))[::2]
        if count <= most and saving > least_saving:
            return
        weakest.children = None


def _saving(node: _Node) -> float:
    """Return what the conditions below a node save, for each leaf that they make."""
    return (node.cost - _leaf_cost(node)) / (_count(node) - 1)


def _leaf_cost(node: _Node) -> float:
    return node.cost if node.children is None else sum(map(_leaf_cost, node.children))


def _count(node: _Node) -> int:
    return 1 if node.children is None else sum(map(_count, node.children))


def _forks(node: _Node) -> list[_Node]:
    return [] if node.children is None else [node, *_forks(node.children[0]), *_forks(node.children[1])]


def _groups(root: _Node, columns: Sequence[Column]) -> list[Group]:
    found: list[Group] = []
    taken: set[str] = set()

    def walk(node: _Node, path: dict[str, tuple[Any, str]]) -> None:
        if node.children is not None:
            column = columns[node.column]
            walk(node.children[0], path | {column.feature: (column.says[node.bound], column.short[node.bound])})
            walk(node.children[1], path)
            return
        said = sorted(path, key=lambda feature: feature not in _SAY_MOST)
        name = _name([path[feature][1] for feature in said], taken)
        taken.add(name)
        found.append(Group(name, {feature: says for feature, (says, _) in path.items()}, node.places))

    walk(root, {})
    return found


def _name(parts: Sequence[str], taken: set[str]) -> str:
    name = "-".join(parts)[:36].rstrip("-_") or "default"
    number = 1
    while (numbered := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return numbered
