"""A canary on engines that the gateway starts itself: started anew, compared, and kept or started as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ADMIN_KEY, Command, gateway_command, until, until_ready
from tests.support.paths import ROOT
from tests.support.simulated_engine import MISSING

POOL = """
server: {{drain_s: 3}}
health: {{interval_s: 0.2}}
models:
  m:
    default_temperature: 1
    backends:
      a: {engine}
      b: {engine}
admin: {{key: "{admin}"}}
state: {{file: {state}}}
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CONFIG = '{"method": "suffix", "num_speculative_tokens": 24}'


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    command = [sys.executable, "-m", "tests.support.simulated_engine"]
    engine = f"{{method: baseline, serve: {{model: org/m, command: {command}, env: {{PYTHONPATH: {ROOT}}}}}}}"
    path.write_text(POOL.format(engine=engine, admin=ADMIN_KEY, state=tmp_path / "state.sqlite"))
    return path


def replica(command: Command, name: str) -> dict[str, Any]:
    found: dict[str, Any] = command.get("/admin/pool", headers=command.admin).json()["models"]["m"]["backends"][name]
    return found


def canary(command: Command, config: str) -> subprocess.Popen[str]:
    line = ["canary", "--replica", "b", "--with", config, "--url", command.url, "--admin-key", ADMIN_KEY]
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *line, "--for", "1h"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_engine_is_started_anew_and_then_as_before(pool: Path, tmp_path: Path, workers: str) -> None:
    with gateway_command(pool, tmp_path, "--workers", workers) as command:
        until_ready(command)
        until(lambda: replica(command, "b")["process"] == "ready")
        before = replica(command, "b")["pid"]
        trying = canary(command, CONFIG)
        until(lambda: command.get("/admin/compare", headers=command.admin).json()["models"])
        until(lambda: replica(command, "b")["state"] == "up")
        tried = replica(command, "b")
        assert (tried["method"], tried["num_speculative_tokens"]) == ("suffix", 24)
        assert tried["pid"] != before
        assert replica(command, "a")["method"] == "baseline"
        served = {command.post("/v1/chat/completions", CHAT).headers["x-gateway-backend"] for _ in range(20)}
        assert served == {"a", "b"}
        assert command.post("/admin/reload", None, headers=command.admin).json()["changes"] == [], "it stays tried"
        # Of two workers, one may not know of the comparison yet.
        until(lambda: command.post("/admin/compare/stop", {"model": "m"}, headers=command.admin).status_code == 200)
        assert trying.wait(60) == 1
        assert "Its engine is started as before." in trying.communicate()[0]
        until(lambda: replica(command, "b")["state"] == "up")
        assert replica(command, "b")["method"] == "baseline"


@pytest.mark.slow
def test_an_engine_that_does_not_start_so_is_started_as_before(pool: Path, tmp_path: Path) -> None:
    with gateway_command(pool, tmp_path) as command:
        until_ready(command)
        until(lambda: replica(command, "b")["process"] == "ready")
        trying = canary(command, f'{{"method": "eagle3", "model": "{MISSING}", "num_speculative_tokens": 3}}')
        said, _ = trying.communicate(timeout=60)
        assert trying.returncode == 1
        assert "The engine of b does not start: exit status 1. It is started as before." in said
        until(lambda: all(replica(command, name)["state"] == "up" for name in "ab"))
        assert replica(command, "b")["method"] == "baseline"
        refused = canary(command, '{"method": "suffix", "num_speculative_tokens": 0}')
        said, _ = refused.communicate(timeout=60)
        assert refused.returncode == 1, said
        assert "Nothing was changed: speculative_config.num_speculative_tokens: must be greater" in said
        until(lambda: all(replica(command, name)["state"] == "up" for name in "ab"))
        said, _ = canary(
            command, '{"method": "custom_class", "model": "os.system", "num_speculative_tokens": 2}'
        ).communicate(timeout=60)
        assert "only the pool file can name it" in said
        until(lambda: replica(command, "b")["state"] in {"up", "recovering"})
