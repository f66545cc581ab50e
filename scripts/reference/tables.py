"""Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, without the columns that are empty in every row."""
    filled = list(rows)
    kept = [column for column in range(len(head)) if any(row[column] for row in filled)]
    lines = [f"| {' | '.join(cell(row[column]) for column in kept)} |\n" for row in (head, *filled)]
    return "".join([lines[0], "|---" * len(kept) + "|\n", *lines[1:]])


def cell(text: str) -> str:
    """Return a text as the content of a cell: on one line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def anchor(heading: str) -> str:
    """Return the fragment by which forges and the site link to a heading.

    Examples
    --------
    >>> anchor("`models.NAME.queue`")
    '#modelsnamequeue'
    """
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
