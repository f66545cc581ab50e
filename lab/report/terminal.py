"""A command's results: lines and tables on the terminal, and on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from backends.validation import UsageError
from lab.report.page import page, table


def text_table(headings: Sequence[str], left: int) -> Table:
    """Return an empty table whose first `left` columns are left-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=index != left - 1)
    return table


def report(
    title: str,
    parts: Sequence[str | Table],
    path: Path | None = None,
    draw: Callable[[], str] = str,
    before: Sequence[str | Table] = (),
) -> None:
    """Print lines and tables, and write them to a page with charts.

    The first line states the finding, and heads the page. On the terminal its basis (`before`) comes first.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    for part in (*before, *parts):
        if isinstance(part, Table):
            console.print(part, "")
        else:
            console.print(part, markup=False, soft_wrap=True)
    if path is not None:
        head, *others = parts
        body = ["<section>", *_html([*before, *others]), "</section>", draw()]
        write_file(path, page(title, title, [str(head)], body).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file of results; raise `UsageError` if it cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the file: {error.strerror}") from None


def write_json(path: Path | None, document: Any) -> None:
    """Write all figures to the file of `--json`, if given."""
    if path is not None:
        write_file(path, orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _html(parts: Sequence[str | Table]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield f"<p>{escape(part)}</p>" if part else ""
            continue
        first, *others = ([str(cell) for cell in column.cells] for column in part.columns)
        headings = [str(column.header) for column in part.columns]
        yield table(headings[0], headings, zip(accumulate(first, _or_last), *others, strict=True))


def _or_last(last: str, name: str) -> str:
    """Return a row's name; the terminal leaves it empty if it equals the row above's."""
    return name or last
