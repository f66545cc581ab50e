"""The mix that a trace shows to be better than the present replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.advice.finding import Finding
from gateway.config.load import load_pool
from gateway.config.settings import ModelSettings
from lab.advise.mix import mix_findings
from lab.trace import TraceRecord

CALIBRATION = "llama-3.1-8b-h100"


def _served(tmp_path: Path, *methods: str) -> ModelSettings:
    lines = ["models:", "  m:", "    policy: {name: least_loaded, seed: 1}", "    backends:"]
    lines += [
        f"      r{number}: {{method: {each}, simulate: {{calibration: {CALIBRATION}}}}}"
        for number, each in enumerate(methods)
    ]
    path = tmp_path / "pool.yaml"
    path.write_text("\n".join(lines))
    return load_pool(path).models["m"]


def _found(served: ModelSettings, count: int = 240) -> list[Finding]:
    records = [
        TraceRecord(id=str(number), arrived_at=0.2 * number, prompt_tokens=200, output_tokens=80 + number % 40,
                    workload="code", temperature=0.0, backend=f"r{number % 2}")
        for number in range(count)
    ]  # fmt: skip
    return list(mix_findings(records, "m", served, CALIBRATION, jobs=1))


def test_two_baselines_are_advised_to_draft(tmp_path: Path) -> None:
    (finding,) = _found(_served(tmp_path, "baseline", "baseline"))
    assert finding.rule == "mix"
    assert finding.title.endswith(" instead of 2x baseline")
    assert finding.gain is not None
    assert 0.2 < finding.gain.low < finding.gain.share < finding.gain.high < 0.9
    assert "Run 2x" in finding.evidence or "Run 1x" in finding.evidence
    assert "method: " in finding.change


@pytest.mark.parametrize(("methods", "count"), [(["baseline"], 240), (["baseline", "baseline"], 4)])
def test_one_replica_and_few_requests_get_no_advice_on_the_mix(tmp_path: Path, methods: list[str], count: int) -> None:
    assert _found(_served(tmp_path, *methods), count) == []
