"""The tables of how far the simulator is off."""

from __future__ import annotations

import pytest

from benchmarks.calibration.__main__ import main
from tests.support.paths import ROOT


def test_the_tables_of_the_page_are_those_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    shown = page.split("python -m benchmarks.calibration")[1].split("What it misses")[0]
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert [row for row in rows if row not in printed] == []
