"""Tables of plain text, for terminals and pipes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def terminal_columns() -> int:
    """Return the width of the terminal; without one, practically no bound, so that `grep` finds whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows as lines: the first `left` columns are aligned to the left, the others to the right.

    Examples
    --------
    >>> columns([["name", "s"], ["a", "10"]], left=1)
    ['name   s', 'a     10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def shortened(name: str, length: int) -> str:
    """Return a name with its middle left out, if it is too long.

    Examples
    --------
    >>> shortened("replica-of-rack-12", 9)
    'repl…k-12'
    """
    if len(name) <= length:
        return name
    return f"{name[: (length - 1) // 2]}…{name[-(length // 2) :]}"
