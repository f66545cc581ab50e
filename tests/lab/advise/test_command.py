"""`gateway advise TRACE`: what a recording of a pool with a wrong k shows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.fleet import Fleet, Replica
from backends.speculation import Method
from gateway.cli.app import app
from lab.trace import Speculation, TraceRecord, write_trace

POOL = """
models:
  m:
    policy: {name: learned}
    backends:
      head:
        method: eagle3
        simulate: {calibration: llama-3.1-8b-h100}
        speculative_config: {num_speculative_tokens: 9}
"""


def recorded(count: int) -> list[TraceRecord]:
    """Return records of requests on a simulated replica with k = 9."""
    known = load_calibration("llama-3.1-8b-h100")
    fleet = Fleet([Replica("head", known, Method.EAGLE3, {"num_speculative_tokens": 9})], 1)
    rng = np.random.default_rng(1)
    completions = []
    for at_s in np.cumsum(rng.exponential(0.3, count)):
        completions += fleet.advance(at_s)
        fleet.submit(0, int(rng.integers(50, 800)), int(rng.integers(40, 250)), at_s, kind="chat", temperature=0.7)
    completions += fleet.advance(math.inf)
    return [
        TraceRecord(
            id=str(one.request_id),
            arrived_at=one.arrived_s,
            model="m",
            endpoint="/v1/chat/completions",
            workload="chat",
            temperature=0.7,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
            backend="head",
            method="eagle3",
            status=200,
            stream=True,
            ttft_s=one.ttft_s,
            e2e_s=one.e2e_s,
            spec=Speculation(one.drafted, one.accepted, one.drafted // 9, one.tokens_per_step),
        )
        for one in completions
    ]


def test_a_recording_shows_that_k_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL)
    write_trace(tmp_path / "trace.jsonl", recorded(300))
    line = ["advise", str(tmp_path / "trace.jsonl"), "--config", str(tmp_path / "pool.yaml")]
    result = CliRunner().invoke(app, [*line, "--json", str(tmp_path / "advice.json")])
    assert result.exit_code == 0, result.output
    [finding] = json.loads((tmp_path / "advice.json").read_text())["models"]["m"]["findings"]
    assert finding["rule"] == "draft_length"
    assert finding["gain"]["low"] > 0
    assert "num_speculative_tokens: 2 # 9" in finding["change"]
    assert "from the totals of answers" in finding["evidence"]

    result = CliRunner().invoke(app, [*line, "--limit", "50"])
    assert "m: nothing to advise" in result.output


def test_wrong_usage_is_said(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL.replace("head:", "other:"))
    write_trace(tmp_path / "trace.jsonl", recorded(5))
    result = CliRunner().invoke(app, ["advise", str(tmp_path / "trace.jsonl")])
    assert result.exit_code == 2
    assert "--config" in result.output
    line = ["advise", str(tmp_path / "trace.jsonl"), "--config", str(tmp_path / "pool.yaml")]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
