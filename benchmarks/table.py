"""Markdown tables, a line at a time, so that a long run shows each row when it has it."""

from __future__ import annotations


def row(*cells: object) -> str:
    """Return a row.

    Examples
    --------
    >>> row("kill", 3)
    '| kill | 3 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def head(*names: str) -> str:
    """Return the first two lines of a table."""
    return f"{row(*names)}\n|{'---|' * len(names)}"
