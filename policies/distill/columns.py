"""The columns of the tree: the bins of a request key, with the rule condition for each split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.features.request import WORKLOAD_NAME
from policies.learned.models.keys import (
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
    thinking_of,
)

_MIN_SHARE = 0.01
"""Minimum share of the requests for a word to get a column."""

_MAX_WORDS = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A numeric column of the tree, in which a condition can express "at most i".

    Only the lower side of a split needs a condition: its rules come first, and rules are tried in order. The upper side
    may be something that no condition can express, such as "any other workload" or "no token limit".
    """

    feature: str  # feature name, as in a rule's `when`
    # Condition for a value of at most i, by i. A column of yes (0) or no (1) has one condition.
    conditions: tuple[Any, ...]
    labels: tuple[str, ...]  # part of a rule's name for each condition


def columns_of(keys: Sequence[Key]) -> list[Column]:
    """Return the columns for some request keys: their bins, and the workloads and templates that are not rare."""
    limits = _bins("max_tokens", "limit", LIMITS)
    columns = [
        _bins("temperature", "temp", TEMPERATURES),
        _bins("overlap", "overlap", OVERLAPS),
        _bins("prompt_tokens", "prompt", PROMPT_TOKENS),
        Column("max_tokens", (*limits.conditions, ">= 0"), (*limits.labels, "limited")),
        Column("turns", ("< 2",), ("first-turn",)),
        Column("thinking", (True,), ("thinks",)),
        Column("structured", (True,), ("structured",)),
        Column("code_share", ("> 0.3",), ("code",)),
    ]
    for feature, index in (("workload", WORKLOAD), ("template", TEMPLATE)):
        counts: Counter[str] = Counter()
        for key in keys:
            counts[key[index]] += 1
        for word, count in counts.most_common(_MAX_WORDS):
            if WORKLOAD_NAME.fullmatch(word) and count >= _MIN_SHARE * len(keys):
                label = word.replace(".", "-") if index == WORKLOAD else f"template-{word}"
                columns.append(Column(feature, (word,), (label,)))
    return columns


def row_of(columns: Sequence[Column], key: Key) -> list[float]:
    """Return the values of a request key in the columns."""
    row = [
        float(key[TEMPERATURE]),
        float(key[OVERLAP]),
        float(key[PROMPT]),
        float(key[LIMIT] or len(LIMITS) + 1),
        float(not key[TURNS].startswith("first")),
        float(thinking_of(key) != "thinks"),
        float(key[SHAPE] != "structured"),
        float(key[SHAPE] != "code"),
    ]
    return row + [
        float(key[WORKLOAD if column.feature == "workload" else TEMPLATE] != column.conditions[0])
        for column in columns[len(row) :]
    ]


def _bins(feature: str, label: str, bounds: Sequence[float]) -> Column:
    labels = (f"{label}-below-{bound:g}".replace(".", "_") for bound in bounds)
    return Column(feature, tuple(f"< {bound:g}" for bound in bounds), tuple(labels))
