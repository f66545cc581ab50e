"""`gateway autopilot` beside a gateway with two launched replicas, which serve streams meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.command import ADMIN_KEY, Command, gateway_command, until
from tests.support.paths import ROOT

POOL = """
server: {{drain_s: 3}}
health: {{interval_s: 0.2}}
models:
  m:
    policy: {{name: least_loaded}}
    default_temperature: 0
    backends:
      one: # the first
        method: baseline
        serve: &engine
          command: [{python}, -m, tests.support.served_simulator]
          model: x
          flags: [--time-scale, "0.1"]
      two: {{method: baseline, serve: *engine}}
recorder: {{path: {records}, flush_s: 0.2}}
admin: {{key: "{admin}"}}
keys: [{{name: team, key: sk-team, may_override: true}}]
state: none
"""
KEY = {"authorization": "Bearer sk-team", "x-gateway-workload": "code"}
BODY = {"model": "m", "prompt": "def f(x):\n    return x\n" * 8, "max_tokens": 24, "temperature": 0}


class Fleet:
    """The gateway, its files, and what the autopilot says of it."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command = command
        self.folder = folder
        self.pool = folder / "pool.yaml"

    def backends(self) -> dict[str, dict[str, Any]]:
        answer = self.command.get("/admin/pool", headers=self.command.admin)
        found: dict[str, dict[str, Any]] = answer.json()["models"]["m"]["backends"]
        return found

    async def autopilot(self, *more: str) -> tuple[int, str]:
        arguments = ["--config", str(self.pool), "--records", str(self.folder / "records"), "--jobs", "1"]
        arguments += ["--calibration", "llama-3.1-8b-h100", "--budget", "6", "--restart-time", "10s", *more]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "autopilot", *arguments, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, printed.decode()

    def apply(self) -> tuple[str, ...]:
        for name, key in (("admin", ADMIN_KEY), ("team", "sk-team")):
            (self.folder / name).write_text(key)
        files = ("--admin-key-file", str(self.folder / "admin"), "--key-file", str(self.folder / "team"))
        return ("--apply", "--gateway", self.command.url, "--floor", "0.5", *files)


async def send(client: httpx.AsyncClient, *, stream: bool = False) -> str:
    answer = await client.post("/v1/completions", json=BODY | {"stream": stream}, headers=KEY)
    whole = "[DONE]" in answer.text if stream else bool(answer.json().get("choices"))
    return "whole" if answer.status_code == 200 and whole else f"{answer.status_code} {answer.text}"


@pytest.mark.slow
async def test_replicas_change_one_by_one_and_no_request_is_lost(tmp_path: Path) -> None:
    text = POOL.format(python=sys.executable, records=tmp_path / "records", admin=ADMIN_KEY)
    (tmp_path / "pool.yaml").write_text(text)
    with gateway_command(tmp_path / "pool.yaml", tmp_path) as command:
        fleet = Fleet(command, tmp_path)
        until(lambda: all(one["state"] == "up" for one in fleet.backends().values()), 60)
        async with httpx.AsyncClient(base_url=command.url, timeout=60, trust_env=False) as client:
            for _ in range(20):
                assert {*await asyncio.gather(*[send(client) for _ in range(30)])} == {"whole"}
            status, printed = await fleet.autopilot()
            assert (status, "dry run" in printed, "ngram" in printed) == (0, True, True), printed
            assert (tmp_path / "pool.yaml").read_text() == text
            before = {name: one["pid"] for name, one in fleet.backends().items()}

            ended, most_down = asyncio.Event(), 0
            answers: list[str] = []

            async def keep_sending() -> None:
                while not ended.is_set():
                    answers.append(await send(client, stream=True))

            async def watch() -> None:
                nonlocal most_down
                while not ended.is_set():
                    found = await asyncio.to_thread(fleet.backends)
                    most_down = max(most_down, sum(one["state"] != "up" for one in found.values()))

            sending = [asyncio.create_task(each()) for each in (*[keep_sending] * 4, watch)]
            status, printed = await fleet.autopilot(*fleet.apply())
            ended.set()
            await asyncio.gather(*sending)
            assert (status, set(answers), most_down) == (0, {"whole"}, 1), printed
            after = fleet.backends()
            changed = [name for name, one in after.items() if one["method"] == "ngram"]
            assert changed, printed
            assert all((after[name]["pid"] != before[name]) is (name in changed) for name in after)
            assert all(one["state"] == "up" for one in after.values())
            assert "# the first" in (tmp_path / "pool.yaml").read_text()
            assert command.post("/admin/reload", None, headers=command.admin).json()["changes"] == []
            journal = json.loads((tmp_path / "pool.yaml.autopilot.json").read_text())
            assert [one["outcome"] for one in journal["changes"]] == ["on trial"]
            status, printed = await fleet.autopilot(*fleet.apply())
            assert (status, "on trial for 2 h" in printed) == (0, True), printed
        assert command.end() == 0
