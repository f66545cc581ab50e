"""`gateway autopilot` beside a gateway with two launched replicas, which serve streams meanwhile."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.speculation import Method
from lab.autopilot.change import Changer, Floor
from lab.autopilot.gateway_admin import ChangeError, GatewayAdmin
from lab.autopilot.journal import Change, Journal, Speculation, Step
from lab.autopilot.options import AutopilotOptions
from lab.autopilot.restart import OfGateway
from lab.autopilot.run import run_autopilot
from lab.trace import TraceRecord, read_trace
from lab.trace.write import write_trace
from tests.support.command import ADMIN_KEY, Command, gateway_command, until
from tests.support.served_upstream import TOKENS
from tests.support.waiting import eventually

POOL = """
server: {{drain_s: 3}}
health: {{interval_s: 0.1}}
models:
  m:
    policy: {{name: least_loaded}}
    default_temperature: 0
    backends:
      one: # the first
        method: baseline
        serve: &engine {{command: [{python}, -m, tests.support.served_upstream], model: x}}
      two: {{method: baseline, serve: *engine}}
recorder: {{path: {records}, flush_s: 0.1}}
admin: {{key: "{admin}"}}
keys: [{{name: team, key: sk-team, may_override: true}}]
state: none
"""
KEY = {"authorization": "Bearer sk-team", "x-gateway-workload": "code"}
BODY = {"model": "m", "prompt": "def f(x):\n    return x\n" * 8, "max_tokens": TOKENS, "temperature": 0}
BASELINE = Speculation(method=Method.BASELINE)


def backends(command: Command) -> dict[str, dict[str, Any]]:
    answer = command.get("/admin/pool", headers=command.admin)
    found: dict[str, dict[str, Any]] = answer.json()["models"]["m"]["backends"]
    return found


async def send(client: httpx.AsyncClient, *, stream: bool = False) -> str:
    answer = await client.post("/v1/completions", json=BODY | {"stream": stream}, headers=KEY)
    whole = "[DONE]" in answer.text if stream else bool(answer.json().get("choices"))
    return "whole" if answer.status_code == 200 and whole else f"{answer.status_code} {answer.text}"


class Traffic:
    """Streams that are sent one after another on four connections, and what the pool looks like meanwhile."""

    def __init__(self, client: httpx.AsyncClient, command: Command) -> None:
        self.answers: list[str] = []
        self.most_down = 0
        self._ended = asyncio.Event()
        self._tasks = [
            asyncio.create_task(one) for one in [*[self._send(client) for _ in range(4)], self._watch(command)]
        ]

    async def end(self) -> None:
        self._ended.set()
        await asyncio.gather(*self._tasks)

    async def _send(self, client: httpx.AsyncClient) -> None:
        while not self._ended.is_set():
            self.answers.append(await send(client, stream=True))

    async def _watch(self, command: Command) -> None:
        while not self._ended.is_set():
            found = await asyncio.to_thread(backends, command)
            self.most_down = max(self.most_down, sum(one["state"] != "up" for one in found.values()))


@pytest.mark.slow
async def test_replicas_change_one_by_one_and_no_request_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    text = POOL.format(python=sys.executable, records=tmp_path / "records", admin=ADMIN_KEY)
    path.write_text(text)
    with gateway_command(path, tmp_path) as command:
        until(lambda: all(one["state"] == "up" for one in backends(command).values()), 60)

        async def autopilot(**more: Any) -> tuple[int, str]:
            said: list[str] = []
            options = AutopilotOptions(
                path, tmp_path / "records", calibration="llama-3.1-8b-h100", budget=4, jobs=1, restart_s=10.0,
                gateway=command.url, admin_key=ADMIN_KEY, key="sk-team", **more,
            )  # fmt: skip
            return await asyncio.to_thread(run_autopilot, options, said.append), "\n".join(said)

        async with httpx.AsyncClient(base_url=command.url, timeout=60, trust_env=False) as client:
            assert await send(client) == "whole"
            await eventually((tmp_path / "records").exists)
            status, said = await autopilot()
            assert (status, "at least 500 requests" in said) == (0, True), said
            for _ in range(18):
                assert {*await asyncio.gather(*[send(client) for _ in range(30)])} == {"whole"}
            await eventually(
                lambda: sum(1 for _ in read_trace([*(tmp_path / "records").iterdir()], format="gateway")) > 18 * 30
            )
            status, said = await autopilot()
            assert (status, "dry run" in said, "baseline  ->  ngram" in said) == (0, True, True), said
            assert (path.read_text(), path.with_name("pool.yaml.autopilot.json").exists()) == (text, False)
            before = {name: one["pid"] for name, one in backends(command).items()}
            traffic = Traffic(client, command)
            status, said = await autopilot(apply=True)
            await traffic.end()
            assert (status, set(traffic.answers), traffic.most_down) == (0, {"whole"}, 1), said
            after = backends(command)
            changed = [name for name, one in after.items() if one["method"] == "ngram"]
            assert changed, said
            assert all((after[name]["pid"] != before[name]) is (name in changed) for name in after)
            assert all(one["state"] == "up" for one in after.values())
            assert "# the first" in path.read_text()
            assert command.post("/admin/reload", None, headers=command.admin).json()["changes"] == []
            status, said = await autopilot(apply=True)
            assert (status, "on trial for 2 h" in said) == (0, True), said
            outcomes = note_a_loss(path, tmp_path / "records")
            status, said = await autopilot(apply=True)
            assert (status, "the last change is undone: 1.5" in said, outcomes()) == (0, True, ["undone", "kept"]), said
            assert {(one["state"], one["method"]) for one in backends(command).values()} == {("up", "baseline")}
        text = path.read_text()
        await fails_and_is_put_back(command, path)
        assert path.read_text() == text
        assert command.end() == 0


def note_a_loss(config: Path, folder: Path) -> Callable[[], list[str]]:
    """Date the change back by an hour and a half, since when requests take half as long again.

    Returns
    -------
    Callable
        Returns the outcomes in the journal.
    """
    path = config.with_name(f"{config.name}.autopilot.json")
    journal = Journal.read(path)
    (change,) = journal.changes
    change.began_s -= 5400.0
    change.ended_s -= 5400.0
    journal.write()
    records = [
        TraceRecord(
            arrived_at=change.began_s + 5.0 * number, model="m", endpoint="chat", status=200, prompt_tokens=100,
            output_tokens=50, e2e_s=(1.5 if number > 0 else 1.0) * (1.0 + 0.01 * (number % 7)),
        )
        for number in range(-1000, 1080)
    ]  # fmt: skip
    write_trace(folder / "requests-earlier.jsonl.zst", records)
    return lambda: [one.outcome for one in Journal.read(path).changes]


async def fails_and_is_put_back(command: Command, path: Path) -> None:
    """Have one replica change to a config that its engine refuses."""
    admin = GatewayAdmin(command.url, command.url, "m", ADMIN_KEY, "sk-team")
    restart = OfGateway(admin, path, {"one": 30.0, "two": 30.0})
    floor = Floor(0.5, 0.8, capacity=lambda _fleet: 10.0, rate=lambda: 0.0)
    said: list[str] = []
    changer = Changer(admin, floor, {"one": restart}, Journal(path.with_name("journal.json")), said.append)
    now = Speculation(method=Method.NGRAM, config={"num_speculative_tokens": 5, "prompt_lookup_max": 4})
    runs = {name: now if one["method"] == "ngram" else BASELINE for name, one in backends(command).items()}
    broken = Speculation(method=Method.EAGLE3, config={"num_speculative_tokens": 3, "model": "refused"})
    change = Change(model="m", began_s=time.time(), gain=0.1, low=0.1, high=0.1, steps=[])
    change.steps = [Step(backend="two", before=runs["two"], after=broken)]
    with pytest.raises(ChangeError, match="two cannot be restarted by the autopilot"):
        await changer.check(change)
    change.steps = [Step(backend="one", before=runs["one"], after=broken)]
    await changer.check(change)
    with pytest.raises(ChangeError, match=r"one does not start with eagle3.*exit status 1.* one runs .* again"):
        await changer.make(change, runs)
    found = backends(command)
    assert {name: (one["state"], one["method"]) for name, one in found.items()} == {
        name: ("up", one.method.value) for name, one in runs.items()
    }
    assert not change.steps[0].done
