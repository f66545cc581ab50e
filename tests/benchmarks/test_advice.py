"""The measurement of advice in the simulator."""

from __future__ import annotations

import sys

import pytest

from benchmarks.routing import advice


@pytest.mark.slow
def test_a_finding_without_a_gain_is_no_change_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as that a comparison is worth most."""
    case = next(each for each in advice.CASES if each.name.startswith("ngram"))
    assert [each.gain for each in advice.advise(advice.play(case, case.members, 0).evidence)] == [None]
    monkeypatch.setattr(advice, "CASES", (case,))
    monkeypatch.setattr(sys, "argv", ["advice", "--seeds", "1"])
    advice.main()
    assert "| nothing |" in capsys.readouterr().out
