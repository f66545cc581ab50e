"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def table_console() -> Console:
    """Return the console for tables: the terminal, or lines of fixed width if the output is redirected."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def text_table(headings: Sequence[str], left: int) -> Table:
    """Return a table without rows, whose first columns are aligned to the left."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=index != left - 1)
    return table
