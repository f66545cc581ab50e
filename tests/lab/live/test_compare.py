"""Made load, sent to a gateway that compares two kinds of simulated replicas meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from tests.support.command import ADMIN_KEY, gateway_command, until
from tests.support.paths import ROOT

POOL = """\
models:
  llama:
    policy: {name: learned}
    backends:
      b0: &plain {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
      b1: *plain
      e0: &head
        method: eagle3
        simulate: {calibration: llama-3.1-8b-h100}
        speculative_config: {num_speculative_tokens: 3}
      e1: *head
"""
MOST_S = 240.0


@pytest.mark.slow
def test_made_load_decides_for_the_head(tmp_path: Path) -> None:
    """Wrong once in a hundred runs at most: the verdict is certain to 99%, and the head takes a fifth less."""
    pool, trace, page = tmp_path / "pool.yaml", tmp_path / "trace.jsonl", tmp_path / "finding.html"
    pool.write_text(POOL)
    write_trace(trace, [TraceRecord(prompt_tokens=100 + n, output_tokens=20 + n % 20) for n in range(50)])
    with gateway_command(pool, tmp_path, env={"XDG_STATE_HOME": str(tmp_path)}) as gateway:

        def compare(*words: str) -> str:
            line = ["compare", *words, "--url", gateway.url, "--admin-key", ADMIN_KEY]
            result = CliRunner().invoke(app, line)
            assert result.exit_code == 0, result.output
            return result.stdout

        def found() -> Any:
            return gateway.get("/admin/compare", headers=gateway.admin).json()["models"]["llama"]

        compare("start", "--a", "baseline", "--b", "eagle3", "--block", "3s", "--until", "0%")
        load = ("--rate", "20", "--temperature", "0", "--for", f"{MOST_S}")
        command = [sys.executable, "-m", "gateway", "replay", str(trace), "--live", f"load={gateway.url}", *load]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as replay:
            try:
                until(lambda: found()["stage"] != "running", MOST_S)
            finally:
                replay.send_signal(signal.SIGINT)
                printed, _ = replay.communicate(timeout=30.0)
        assert f"`gateway compare report --url {gateway.url}`, or with the address of its `admin.listen`" in printed
        seen = found()
        assert seen["stage"] == "decided", seen["sentence"]
        assert seen["findings"][0]["better"] == "eagle3"
        assert seen["findings"][0]["at_mean"]["high"] < 1.0
        assert "eagle3 takes " in compare("report", str(page))
        assert seen["sentence"] in page.read_text("utf-8")
