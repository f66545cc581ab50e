"""Addresses and processes of the replicas of a pool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.config.pool_file import PoolFile
from gateway.config.settings import PoolSettings
from gateway.service.replicas import SIMULATOR, plan

SIMULATED = {"simulate": {"calibration": "llama-3.1-8b-h100"}}
POLICY = {"policy": {"name": "least_loaded"}}


def pool(**models: dict[str, Any]) -> PoolSettings:
    return PoolFile.model_validate({"models": {name: {**POLICY, **model} for name, model in models.items()}})


def test_a_replica_with_a_url_starts_no_process(tmp_path: Path) -> None:
    planned = plan(
        pool(m={"backends": {"a": {"method": "baseline", "url": "http://h:1", "api_key": "sk-own"}}}), tmp_path
    )
    assert planned.launches == ()
    (backend,) = planned.backends
    assert (backend.url, backend.api_key) == ("http://h:1", "sk-own")
    assert (backend.simulated, backend.launched) == (False, False)
    assert "sk-own" not in repr(backend)


def test_the_command_line_and_environment_of_vllm(tmp_path: Path) -> None:
    served = {
        "aliases": ["alias"],
        "backends": {
            "e": {
                "method": "eagle",
                "api_key": "secret",
                "serve": {"model": "org/target", "flags": ["--dtype", "bfloat16"], "env": {"A": "1"}},
                "speculative_config": {"model": "org/head", "num_speculative_tokens": 3},
            }
        },
    }
    planned = plan(pool(**{"org/m": served}), tmp_path)
    (launch,) = planned.launches
    assert launch.argv[:3] == ("vllm", "serve", "org/target")
    assert launch.argv[launch.argv.index("--served-model-name") + 1 :][:2] == ("org/m", "alias")
    config = json.loads(launch.argv[launch.argv.index("--speculative-config") + 1])
    assert config == {"method": "eagle", "model": "org/head", "num_speculative_tokens": 3}
    assert launch.env == {"A": "1", "VLLM_API_KEY": "secret"}
    assert "secret" not in " ".join(launch.argv)
    assert launch.health_urls == (f"{planned.backends[0].url}/health",)
    assert launch.log_path.parent == tmp_path
    assert planned.backends[0].num_speculative_tokens == 3
    assert planned.backends[0].launched


@pytest.mark.parametrize(("on_path", "found"), [(False, "bin"), (True, "")])
def test_vllm_is_found_beside_the_python_that_runs_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: bool, found: str
) -> None:
    for folder in ("bin", "path"):
        command = tmp_path / folder / "vllm"
        command.parent.mkdir()
        command.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path") if on_path else str(tmp_path))
    served: dict[str, Any] = {"method": "baseline", "serve": {"model": "org/target"}}
    (launch,) = plan(pool(m={"backends": {"a": served}}), tmp_path).launches
    assert launch.argv[0] == (str(tmp_path / found / "vllm") if found else "vllm")
    served["serve"]["command"] = [".venv-vllm/bin/vllm"]
    (launch,) = plan(pool(m={"backends": {"a": served}}), tmp_path).launches
    assert launch.argv[0] == ".venv-vllm/bin/vllm", "a path is taken as it is"


def test_no_port_is_chosen_twice_before_anything_listens_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.sample", lambda among, count: [*among][:count])  # the same each time
    monkeypatch.setattr("backends.launch.ports.port_is_free", lambda host, port: True)
    served = {name: {"method": "baseline", "serve": {"model": "org/target"}} for name in "abc"}
    listed = {"d": {"method": "baseline", "url": "http://127.0.0.1:20001"}}  # which does not run yet
    planned = plan(pool(m={"backends": {**served, **listed}}), tmp_path)
    assert len({each.url for each in planned.backends}) == 4


def test_all_simulated_replicas_share_one_process(tmp_path: Path) -> None:
    simulated = {"backends": {"a": {"method": "baseline", **SIMULATED}, "b": {"method": "suffix", **SIMULATED}}}
    planned = plan(pool(m=simulated, n=simulated), tmp_path)
    (launch,) = planned.launches
    assert launch.name == SIMULATOR
    assert len({backend.url for backend in planned.backends}) == 4
    assert all(backend.launched for backend in planned.backends)
    assert len(launch.health_urls) == 4
    document = Path(launch.argv[-1])
    assert document.stat().st_mode & 0o077 == 0  # it may contain keys
    assert len({replica["name"] for replica in json.loads(document.read_text())["replicas"]}) == 4
