"""What a tree of rules may ask of a request: its cell's bins, in the words of a rule's `when`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.features.request import WORKLOAD as WORKLOAD_NAME
from policies.learned.models.buckets import (
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

_LEAST_SHARE = 0.01
"""Of the requests: a word that is rarer is not asked for."""

_MOST_WORDS = 12


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


def columns_of(keys: Sequence[Key]) -> list[Column]:
    """Return what may be asked: the cells' bins, and the workloads and templates that are not rare."""
    limits = _bins("max_tokens", "limit", LIMITS)
    columns = [
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


def row_of(columns: Sequence[Column], key: Key) -> list[float]:
    """Return the numbers of a request, one for each column."""
    row = [
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


def _bins(feature: str, short: str, bounds: Sequence[float]) -> Column:
    names = (f"{short}-below-{bound:g}".replace(".", "_") for bound in bounds)
    return Column(feature, tuple(f"< {bound:g}" for bound in bounds), tuple(names))
