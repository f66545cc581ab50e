"""A small tree of conditions, each leaf with the backends to prefer, written as rules tried in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.cells import (
    LIMIT,
    LIMITS,
    OVERLAP,
    OVERLAPS,
    PROMPT,
    PROMPT_TOKENS,
    SHAPE,
    TEMPERATURE,
    TEMPERATURES,
    TEMPLATE,
    TURNS,
    WORKLOAD,
    Key,
)
from policies.request import WORKLOAD as WORKLOAD_NAME

Floats = npt.NDArray[np.float64]

LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Bounds that a rule may set on requests in flight per backend."""

_FIRST_CHOICE = 0.7
"""Share of a rule's requests that get what it prefers most; the others spill over to the next."""

_MOST_WORDS = 12
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Column:
    """One thing that the tree may ask, as a number whose lower side is what a condition can say.

    Rules are tried in order and those of the lower side come first, so the upper side never needs saying: "another
    workload", or "no limit on tokens", which no condition can express.

    Parameters
    ----------
    feature
        As in a rule's `when`.
    says
        The condition of being at most at place i; one of them where the column is yes (0) or no (1).
    short
        The same as part of a rule's name.
    """

    feature: str
    says: tuple[Any, ...]
    short: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where requests go that meet `when` and none of the leaves before.

    Parameters
    ----------
    share
        Of the requests, 0 to 1.
    prefer
        The best first.
    costs
        Mean cost of each of `prefer`, relative to the mean of all in this leaf.
    """

    name: str
    when: dict[str, Any]
    share: float
    prefer: tuple[str, ...]
    costs: tuple[float, ...]


def columns_of(keys: Sequence[Key]) -> list[Column]:
    """Return what may be asked: the cells' bins, the load, and the workloads and templates that are not rare."""
    limits = _bins("max_tokens", "limit", LIMITS)
    columns = [
        _bins("in_flight_per_backend", "load", LOADS),
        _bins("temperature", "temp", TEMPERATURES),
        _bins("overlap", "overlap", OVERLAPS),
        _bins("prompt_tokens", "prompt", PROMPT_TOKENS),
        Column("max_tokens", (*limits.says, ">= 0"), (*limits.short, "limited")),
        Column("turns", ("< 2",), ("first-turn",)),
        Column("structured", (True,), ("structured",)),
        Column("code_share", ("> 0.3",), ("code",)),
    ]
    for feature, place in (("workload", WORKLOAD), ("template", TEMPLATE)):
        seen: Counter[str] = Counter()
        for key in keys:
            seen[key[place]] += 1
        for word, count in seen.most_common(_MOST_WORDS):
            if WORKLOAD_NAME.fullmatch(word) and count >= _LEAST_SHARE * len(keys):
                short = word.replace(".", "-") if place == WORKLOAD else f"template-{word}"
                columns.append(Column(feature, (word,), (short,)))
    return columns


def row_of(columns: Sequence[Column], key: Key, in_flight_per_backend: float) -> list[float]:
    """Return the numbers of a request under a load, one for each column."""
    row = [
        float(sum(bound <= in_flight_per_backend for bound in LOADS)),
        float(key[TEMPERATURE]),
        float(key[OVERLAP]),
        float(key[PROMPT]),
        float(key[LIMIT] or len(LIMITS) + 1),
        float(key[TURNS] != "first"),
        float(key[SHAPE] != "structured"),
        float(key[SHAPE] != "code"),
    ]
    return row + [
        float(key[WORKLOAD if column.feature == "workload" else TEMPLATE] != column.says[0])
        for column in columns[len(row) :]
    ]


def grow(
    columns: Sequence[Column], rows: Floats, costs: Floats, weights: Floats, targets: Sequence[str], most_leaves: int
) -> list[Leaf]:
    """Return the leaves of a tree that costs little, in the order in which they are to be tried.

    A regression tree finds where costs differ; then leaves are joined, those first that lose least by having the same
    preference, until there are few enough and each that is left is worth having.

    Parameters
    ----------
    rows
        Shape (samples, columns).
    costs
        Shape (samples, targets), in seconds.
    weights
        Shape (samples,).
    """
    from sklearn.tree import DecisionTreeRegressor  # here, for it takes a second to import

    means = costs.mean(axis=1)
    tree = DecisionTreeRegressor(max_leaf_nodes=8 * most_leaves, min_weight_fraction_leaf=_LEAST_SHARE, random_state=0)
    # A relative cost with the mean's weight: the mean over a leaf is then that of seconds, without long answers
    # deciding alone where to split.
    tree.fit(rows, costs / means[:, None], sample_weight=weights * means)
    weighted = costs * weights[:, None]
    root = _node(tree.tree_, 0, np.arange(len(rows)), rows, weighted)
    _prune(root, most_leaves, _worth_having(weighted))
    return _leaves(root, columns, weighted, targets)


def shortened(leaves: Sequence[Leaf], length: int) -> list[Leaf]:
    """Return leaves that prefer so many targets at most; those before the last that then say the same are left out."""
    found = [replace(leaf, prefer=leaf.prefer[:length], costs=leaf.costs[:length]) for leaf in leaves]
    while len(found) > 1 and found[-2].prefer == found[-1].prefer:
        *found, other, last = found
        share = other.share + last.share
        pairs = zip(other.costs, last.costs, strict=True)
        costs = tuple((other.share * one + last.share * two) / share for one, two in pairs)
        found.append(replace(last, share=share, costs=costs))
    return found


@dataclass(slots=True)
class _Node:
    samples: npt.NDArray[np.int64]
    cost: float
    """Of the requests in it, if they all had the same preference."""
    column: int = -1
    place: int = 0
    children: tuple[_Node, _Node] | None = None


def _node(tree: Any, number: int, samples: npt.NDArray[np.int64], rows: Floats, weighted: Floats) -> _Node:
    node = _Node(samples, _cost(weighted[samples]))
    if tree.children_left[number] >= 0:
        node.column, threshold = int(tree.feature[number]), float(tree.threshold[number])
        node.place = int(np.floor(threshold))
        low = rows[samples, node.column] <= threshold
        node.children = (
            _node(tree, tree.children_left[number], samples[low], rows, weighted),
            _node(tree, tree.children_right[number], samples[~low], rows, weighted),
        )
    return node


def _cost(weighted: Floats) -> float:
    totals = np.sort(weighted.sum(axis=0))
    return float(totals[0] if len(totals) == 1 else _FIRST_CHOICE * totals[0] + (1 - _FIRST_CHOICE) * totals[1])


def _worth_having(weighted: Floats) -> float:
    """Return the saving from which on a condition is worth reading: a hundredth of what there is to save."""
    each = np.sort(weighted, axis=1)
    second = each[:, min(1, each.shape[1] - 1)]
    return 0.01 * max(0.0, _cost(weighted) - float((_FIRST_CHOICE * each[:, 0] + (1 - _FIRST_CHOICE) * second).sum()))


def _prune(root: _Node, most_leaves: int, least_saving: float) -> None:
    while (count := _count(root)) > 1:
        saving, weakest = min((_saving(node), place, node) for place, node in enumerate(_forks(root)))[::2]
        if count <= most_leaves and saving > least_saving:
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


def _leaves(root: _Node, columns: Sequence[Column], weighted: Floats, targets: Sequence[str]) -> list[Leaf]:
    found: list[Leaf] = []
    taken: set[str] = set()

    def walk(node: _Node, path: dict[str, tuple[Any, str]]) -> None:
        if node.children is not None:
            column = columns[node.column]
            walk(node.children[0], path | {column.feature: (column.says[node.place], column.short[node.place])})
            walk(node.children[1], path)
            return
        totals = weighted[node.samples].sum(axis=0)
        order = np.argsort(totals, kind="stable")
        name = _name([short for _, short in path.values()], taken)
        taken.add(name)
        found.append(
            Leaf(
                name,
                {feature: says for feature, (says, _) in path.items()},
                len(node.samples) / len(weighted),
                tuple(targets[place] for place in order),
                tuple(float(totals[place] / totals.mean()) for place in order),
            )
        )

    walk(root, {})
    return found


def _name(parts: Sequence[str], taken: set[str]) -> str:
    name = "-".join(parts)[:36].rstrip("-_") or "default"
    number = 1
    while (numbered := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return numbered


def _bins(feature: str, short: str, bounds: Sequence[float]) -> Column:
    names = (f"{short}-below-{bound:g}".replace(".", "_") for bound in bounds)
    return Column(feature, tuple(f"< {bound:g}" for bound in bounds), tuple(names))
