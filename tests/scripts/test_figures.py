"""Figures that stand on several pages come from one table."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from lab.plan.show import LEFT_OUT
from scripts.reference.figures import FigureError, filled, read_figures, run_command
from tests.support.paths import ROOT

PAGE = """\
| policy | mean |
|---|---|
| learned | 1 |

### Pool

| policy | load | mean | p50 / p99 ms |
|---|---|---|---|
| `learned` | 50% | **0.845** ±0.002 | 1.4 / 2,345.6 |
| learned warm | 50% | 0.9 | 1 / 2 |
"""


def figures(root: Path, entry: str) -> dict[str, str]:
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs/page.md").write_text(PAGE)
    (root / "docs/figures.yaml").write_text(
        f"- page: docs/page.md\n  below: '### Pool'\n  figures: {{name: [{entry}]}}\n"
    )
    return read_figures(root)


def test_a_figure_is_a_cell_of_the_table_below_a_line(tmp_path: Path) -> None:
    assert figures(tmp_path, "learned, mean, .2f") == {"name": "0.85"}
    assert figures(tmp_path, "learned | 50%, p50 / p99 ms, ',.0f', 1") == {"name": "2,346"}


@pytest.mark.parametrize(
    "entry", ["gone, mean, .2f", "learned, gone, .2f", "learned, mean, .2f, 2", "learned | 75%, mean, .2f"]
)
def test_a_table_without_the_figure_is_an_error(tmp_path: Path, entry: str) -> None:
    with pytest.raises(FigureError, match=r"name: there is no such figure: docs/page\.md, below '### Pool'"):
        figures(tmp_path, entry)


def test_marked_places_are_filled(tmp_path: Path) -> None:
    text = "| **0.80<!-- name -->** (0.7<!-- name -->), 3 ms<!-- a comment -->"
    pages = {tmp_path / "a.md": text, tmp_path / "b.md": "nothing 0.80"}
    assert filled(pages, {"name": "0.85"}) == {
        tmp_path / "a.md": "| **0.85<!-- name -->** (0.85<!-- name -->), 3 ms<!-- a comment -->"
    }


def test_names_that_one_side_lacks_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FigureError, match="no figure 'other'"):
        filled({tmp_path: "0.8<!-- other -->"}, {})
    with pytest.raises(FigureError, match="no page names: name"):
        filled({tmp_path: "0.8"}, {"name": "1"})


@pytest.mark.slow
def test_an_output_is_what_the_command_prints(tmp_path: Path) -> None:
    text = (
        "<!-- output -->\n```console\n$ gateway a \\\n  --b\nold\n\nlines\n```\nend\n```console\n$ gateway c\nd\n```\n"
    )
    wanted = text.replace("old\n\nlines\n", "ran gateway a \\\n  --b\n")
    assert filled({tmp_path: text}, {}, lambda command: f"ran {command}\n") == {tmp_path: wanted}
    assert run_command("gateway \\\n  --version") == f"gateway {version('speculation-gateway')}\n"


def test_the_same_figure_is_not_typed_twice() -> None:
    """The table of results marks each of the figures that it has from other pages."""
    rows = [
        line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.startswith("|") and "<!--" in line
    ]
    assert len(rows) >= 3
    for row in rows:
        assert re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.]|<!--)", row) == [], row


def test_the_error_of_the_simulator_that_plans_state_is_the_measured_one() -> None:
    figures = read_figures(ROOT)
    for name, words in (("tokens", "{}% in the median"), ("tokens.most", "{}% at most"), ("crossing", "factor of {}")):
        assert words.format(figures[f"simulator.{name}"]) in LEFT_OUT
