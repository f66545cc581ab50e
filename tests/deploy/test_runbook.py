"""The commands of docs/runbook.md, run against a gateway."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.gateway.conftest import MODEL
from tests.support.command import ADMIN_KEY, gateway_command, until
from tests.support.paths import ROOT
from tests.support.registered_metrics import sample_names
from tests.support.upstream import upstreams_in_thread

PAGE = (ROOT / "docs/runbook.md").read_text()
BLOCKS = re.findall(r"```sh\n(.+?)```", PAGE, re.DOTALL)
COMMANDS = sorted({each.replace("\n", " ") for each in re.findall(r"`((?:get|post|series) [^`]+)`", PAGE)})
RECORDED = re.findall(r"record: (\S+)", (ROOT / "deploy/prometheus/rules.yml").read_text())


def test_every_series_it_names_exists() -> None:
    names = set(re.findall(r"[\w:]*\bgateway_\w+(?::\w+)*", PAGE))
    exact = sample_names() | set(RECORDED)
    assert all(name in exact or any(each.startswith(name) for each in exact) for name in names)


@pytest.mark.slow
def test_its_commands_are_answered(tmp_path: Path) -> None:
    (definitions,) = BLOCKS
    assert len(COMMANDS) >= 10
    with upstreams_in_thread("B", MODEL) as (upstream,):
        pool = tmp_path / "pool.yaml"
        policy = {"name": "learned", "slo": {"ttft_ms": 9000}}
        backends = {"B": {"method": "baseline", "url": upstream.url}}
        settings = {
            "models": {MODEL: {"policy": policy, "default_temperature": 1, "backends": backends}},
            "state": "none",
            "recorder": {"path": str(tmp_path / "traces")},
            "telemetry": {"access_log": 0.5},
            "admin": {"key": ADMIN_KEY},
        }
        pool.write_text(yaml.safe_dump(settings))
        messages = [{"role": "user", "content": "a"}]
        (tmp_path / "request.json").write_text(json.dumps({"model": MODEL, "messages": messages}))
        with gateway_command(pool, tmp_path) as command:
            until(lambda: command.get("/readyz").status_code == 200)
            for number in range(2):
                command.post("/v1/chat/completions", {"model": MODEL, "messages": [], "seed": number})
            addresses = f"GATEWAY={command.url} ADMIN={command.url} KEY={ADMIN_KEY}"
            script = re.sub(r"(?m)^export .*$", addresses, definitions)
            for asked in COMMANDS:
                line = asked.replace('"M"', f'"{MODEL}"').replace("=M", f"={MODEL}")
                result = subprocess.run(
                    ["bash", "-c", f"set -o pipefail\n{script}\n{line}"],
                    cwd=tmp_path,
                    capture_output=True,
                    text=True,
                    timeout=30,
                    check=False,
                )
                absent = asked.startswith("series") and result.returncode == 1 and not result.stderr  # none counted
                early = f"It is not known what {MODEL} needs: " in result.stdout  # before an hour of traffic
                assert result.returncode == 0 or absent or early, f"{asked}\n{result.stdout}{result.stderr}"
