"""A replica with `serve` that is started anew by a reload, with two workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ADMIN_KEY, Command, gateway_command, until

POOL = """
server: {{drain_s: 3}}
health: {{interval_s: 0.2}}
models:
  m:
    policy: {{name: round_robin}}
    default_temperature: 1
    backends:
      one: {{method: baseline, serve: &engine {{command: [{python}, -m, tests.support.served_upstream], model: x}}}}
      two: {{{two}, serve: *engine}}
admin: {{key: "{admin}"}}
state: none
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def write(path: Path, two: str) -> None:
    path.write_text(POOL.format(python=sys.executable, two=two, admin=ADMIN_KEY))


def backend(command: Command, name: str) -> dict[str, Any]:
    found: dict[str, Any] = command.get("/admin/pool", headers=command.admin).json()["models"]["m"]["backends"][name]
    return found


def all_up(command: Command, **two: object) -> bool:
    found = {name: backend(command, name) for name in ("one", "two")}
    up = all(each["state"] == "up" and each["process"] == "ready" for each in found.values())
    return up and all(found["two"][key] == value for key, value in two.items())


@pytest.mark.slow
def test_a_launched_replica_is_started_anew_with_another_method(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    write(path, "method: baseline")
    with gateway_command(path, tmp_path, "--workers", "2") as command:
        until(lambda: all_up(command), 60)
        before = {name: backend(command, name) for name in ("one", "two")}
        write(path, "method: ngram, speculative_config: {num_speculative_tokens: 3, prompt_lookup_max: 4}")
        refused = command.post("/admin/reload", None, headers=command.admin)
        assert refused.status_code == 409
        other = command.post("/admin/reload?restart=m/one", None, headers=command.admin)
        assert (other.status_code, "m.backends.two" in other.text) == (409, True)
        unknown = command.post("/admin/reload?restart=m/three", None, headers=command.admin)
        assert (unknown.status_code, "MODEL/BACKEND" in unknown.text) == (409, True)
        drained = {"model": "m", "backend": "two"}
        assert command.post("/admin/drain", drained, headers=command.admin).status_code == 200
        changed = command.post("/admin/reload?restart=m/two", None, headers=command.admin)
        assert changed.json()["changes"][0] == "models.m.backends.two.method: baseline -> ngram"
        command.post("/admin/resume", drained, headers=command.admin)
        until(lambda: all_up(command, method="ngram", num_speculative_tokens=3), 60)
        after = {name: backend(command, name) for name in ("one", "two")}
        assert after["one"]["pid"] == before["one"]["pid"]
        assert after["two"]["pid"] != before["two"]["pid"]
        answer = command.post("/v1/chat/completions", CHAT, headers={"x-gateway-backend": "two"})
        assert (answer.status_code, answer.headers["x-gateway-backend"]) == (200, "two")
        assert "m/two is started anew" in command.printed()
        assert command.end() == 0
