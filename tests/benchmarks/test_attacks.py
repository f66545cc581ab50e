"""The attacks of `benchmarks.attacks` that show in seconds whether the gateway holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attacks.framing import CASES
from tests.support.paths import ROOT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_ambiguous_request_has_another_inside(case: object) -> None:
    assert isinstance(case, type(CASES[0]))
    request = case.request(b"/v1/chat/completions", b"authorization: Bearer key\r\n")
    assert request.count(b"SMUGGLED") == 1
    assert request.count(b"HTTP/1.") == 2
    assert b"{" not in request.partition(b"\r\n\r\n")[0]


@pytest.mark.slow
def test_nothing_is_smuggled_and_nobody_else_loses_a_request_or_memory(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    names = ("small-values", "framing")
    attacks = [part for name in names for part in ("--attack", name)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.attacks", "--only", "gateway", *attacks, "--hold", "1", "--json", results],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=False,  # its status tells, besides, of a wait of more than a second, as on a busy machine
    )
    of_attack = {result["attack"]: result for result in json.loads(results.read_text())}
    for result in of_attack.values():
        assert result["verdict"] in {"survived", "hurt bystanders"}
        assert result["lost"] == {}
        assert result["requests"] > 0
    values, framing = (of_attack[name] for name in names)
    assert set(values["answers"]) == {"413"}
    assert values["rss_peak_mb"] - values["rss_before_mb"] < 2 * 4 * 63
    assert framing["smuggled"] == 0
    assert framing["answers"] == {"400": len(CASES)}
