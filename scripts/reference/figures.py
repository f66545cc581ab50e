"""Figures that stand on several pages, each taken from the one table that has it, and outputs of commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal, localcontext
from itertools import dropwhile, takewhile
from pathlib import Path

import yaml

_MARKED = re.compile(r"(?<![^\s|*(])[^\s|*(]+(?=<!-- ([\w.-]+) -->)")
_OUTPUT = re.compile(r"(?<=<!-- output -->\n```console\n)\$ (gateway (?:.*\\\n)*.*)\n(?:.*\n)*?(?=```\n)")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


class FigureError(Exception):
    """Raised for a figure that no table has, that no page uses, or whose name is unknown."""


def read_figures(root: Path) -> dict[str, str]:
    """Return the figures that `docs/figures.yaml` names, by name, as text for pages.

    Raises
    ------
    FigureError
        If a table does not have a figure.
    """
    figures = {}
    for source in yaml.safe_load((root / "docs/figures.yaml").read_text("utf-8")):
        rows = _rows(_table((root / source["page"]).read_text("utf-8"), source["below"]))
        for name, (row, column, form, *which) in source["figures"].items():
            try:
                [cells] = [cells for cells in rows if cells[: row.count("|") + 1] == _cells(row)]
                number = _NUMBER.findall(cells[rows[0].index(column)])[which[0] if which else 0]
            except (ValueError, IndexError):
                where = f"{source['page']}, below '{source['below']}', row '{row}', column '{column}'"
                raise FigureError(f"docs/figures.yaml: {name}: there is no such figure: {where}") from None
            with localcontext(rounding=ROUND_HALF_UP):
                figures[name] = format(Decimal(number.replace(",", "")), form)
    return figures


def filled(pages: dict[Path, str], figures: dict[str, str], run: Callable[[str], str] | None = None) -> dict[Path, str]:
    """Return the pages that have marked places or outputs, with what belongs there.

    Raises
    ------
    FigureError
        If a mark is of no figure, or a figure has no mark.
    """
    used: set[str] = set()

    def figure(place: re.Match[str]) -> str:
        if place[1] not in figures:
            raise FigureError(f"docs/figures.yaml has no figure '{place[1]}', which a page names")
        used.add(place[1])
        return figures[place[1]]

    def output(place: re.Match[str]) -> str:
        return f"$ {place[1]}\n{(run or run_command)(place[1])}"

    result = {path: _OUTPUT.sub(output, _MARKED.sub(figure, text)) for path, text in pages.items()}
    if unused := figures.keys() - used:
        raise FigureError(f"docs/figures.yaml has figures that no page names: {', '.join(sorted(unused))}")
    return {path: text for path, text in result.items() if _MARKED.search(text) or _OUTPUT.search(text)}


def run_command(command: str) -> str:
    """Return what a command of the gateway prints in the root of the repository; lines end without spaces."""
    words = [str(Path(sys.executable).with_name("gateway")), *shlex.split(command.replace("\\\n", " "))[1:]]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=root)  # noqa: S603
    return re.sub(r"[ \t]+$", "", done.stdout.strip("\n"), flags=re.MULTILINE) + "\n"


def _table(page: str, below: str) -> list[str]:
    """Return the lines of the first table at or below the line that begins with a text."""
    lines = dropwhile(lambda line: not line.startswith(below), page.splitlines())
    return list(takewhile(_is_row, dropwhile(lambda line: not _is_row(line), lines)))


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _rows(table: list[str]) -> list[list[str]]:
    return [_cells(line.strip("| ")) for line in table]


def _cells(row: str) -> list[str]:
    return [re.sub(r"[`*]", "", cell).strip() for cell in row.split("|")]
