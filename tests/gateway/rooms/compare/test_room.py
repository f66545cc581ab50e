"""A comparison on a running gateway: it gives requests to arms, decides, ends by itself, and outlives its process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from backends.draft_schedule import DraftSchedule, Speculation
from backends.health import State
from backends.speculation import Method
from gateway.cli.app import app
from gateway.rooms.compare import room, running
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, start_gateway
from tests.support.upstream import Wire, well
from tests.support.waiting import eventually_async

METHODS = {"a0": "baseline", "a1": "baseline", "b0": "eagle3", "b1": "eagle3"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
FASTER = 12.0
"""How fast the clock of comparisons runs: a block of 10 s takes less than one."""


@pytest.fixture(autouse=True)
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks of time pass faster than requests do."""
    began_s = time.time()
    clock = SimpleNamespace(time=lambda: began_s + FASTER * (time.time() - began_s), monotonic=time.monotonic)
    monkeypatch.setattr(room, "time", clock)
    monkeypatch.setattr(running, "time", clock)
    monkeypatch.setattr(room, "_JUDGE_S", 0.2)


async def slow_baseline(wire: Wire) -> None:
    """Answer, a baseline later than a head."""
    await asyncio.sleep(0.03 if wire.upstream.name.startswith("a") else 0.01)
    await well(wire)


async def start(gateway: Running, **fields: Any) -> httpx.Response:
    asked = {"a": "baseline", "b": "eagle3", "block_s": 10, **fields}
    return await gateway.client.post("/admin/compare/start", json=asked, headers=ADMIN)


async def found(gateway: Running) -> dict[str, Any]:
    answer = (await gateway.client.get("/admin/compare", headers=ADMIN)).json()["models"]
    return answer[MODEL] if answer else {}


async def ask_until(gateway: Running, stage: str) -> None:
    """Send requests, four at a time, until the comparison is at a stage."""

    async def ask() -> None:
        while True:
            await gateway.chat(stream=True)

    asking = [asyncio.create_task(ask()) for _ in range(6)]
    try:

        async def is_there() -> bool:
            return (await found(gateway)).get("stage") == stage

        await eventually_async(is_there, 120.0)
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.slow
async def test_the_better_arm_is_found_and_the_comparison_ends(tmp_path: Path) -> None:
    state = {"file": str(tmp_path / "state.sqlite")}
    async with start_gateway(METHODS, behaviour=slow_baseline, state=state) as gateway:
        assert await found(gateway) == {}
        assert (await start(gateway)).status_code == 200
        again = await start(gateway)
        assert again.status_code == 409
        assert "gateway compare stop" in again.json()["error"]["message"]
        await ask_until(gateway, "decided")
        (advice,) = (await gateway.client.get("/admin/advice", headers=ADMIN)).json()["models"][MODEL]["findings"]
        assert advice["rule"] == "compared"
        assert advice["gain"]["low"] > 0.0
        seen = await found(gateway)
        assert seen["findings"][0]["better"] == "eagle3"
        assert seen["findings"][0]["at_mean"]["high"] < 1.0
        assert seen["arms"]["baseline"]["replicas"] == ["a0", "a1"]
        assert seen["sentence"].startswith("eagle3 takes ")
        assert "start a0, a1 as b0" in seen["change"]
        assert '"num_speculative_tokens": 3' in seen["change"]
        assert not gateway.gateway.relay.router._narrowing, "the policy chooses among all again"

        line = ["--url", gateway.url, "--admin-key", ADMIN_KEY]
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["compare", "status", *line])
        assert f"{MODEL}, decided after" in shown.stdout
        page = tmp_path / "page.html"
        written = await asyncio.to_thread(CliRunner().invoke, app, ["compare", "report", str(page), *line])
        assert written.exit_code == 0, written.output
        served = await gateway.client.get("/admin/compare/report", headers=ADMIN)
        assert served.text == page.read_text("utf-8")
        assert seen["sentence"] in served.text
        assert "<svg" in served.text

    async with start_gateway(METHODS, state=state) as gateway:
        assert (await found(gateway))["stage"] == "decided", "it is known after a restart"


@pytest.mark.slow
async def test_a_comparison_goes_on_after_a_restart_until_it_is_stopped(tmp_path: Path) -> None:
    state = {"file": str(tmp_path / "state.sqlite")}
    async with start_gateway(METHODS, state=state) as gateway:
        assert (await start(gateway, until=0.0)).status_code == 200
        await ask_until(gateway, "running")
        await gateway.until(lambda: bool(gateway.gateway.relay.router._narrowing))
    async with start_gateway(METHODS, state=state) as gateway:
        await gateway.until(lambda: bool(gateway.gateway.relay.router._narrowing))
        line = ["compare", "stop", "--url", gateway.url, "--admin-key", ADMIN_KEY]
        ended = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert ended.exit_code == 0, ended.output
        assert "stopped after" in ended.stdout
        again = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert again.exit_code == 1
        assert "Nothing of m is being compared." in again.stderr


@pytest.mark.parametrize(
    ("arms", "problem"),
    [
        ({"a": "egle3"}, "no replica has the name or the method 'egle3'; did you mean 'eagle3'?"),
        ({"a": "baseline", "b": "a0"}, "a0 would be in both arms"),
        ({"a": "eagle3"}, "a and b are the same"),
        ({"a": " , "}, "an arm has no replica"),
    ],
)
async def test_arms_that_are_not_there_or_not_apart_are_refused(
    arms: dict[str, str], problem: str, tmp_path: Path
) -> None:
    async with start_gateway(METHODS, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        answer = await start(gateway, **arms)
        assert answer.status_code == 400
        assert problem in answer.json()["error"]["message"]
        assert await found(gateway) == {}
        assert (await gateway.client.get("/admin/compare")).status_code == 401


@pytest.mark.parametrize("text", ["2", "2 weeks", "-1h", "h"])
def test_a_time_that_is_none_is_refused_before_anything_has_happened(text: str) -> None:
    result = CliRunner().invoke(app, ["compare", "start", "--a", "x", "--b", "y", "--for", text])
    assert result.exit_code == 2
    assert "is no time; expected 90s, 30m, 2h or 1d" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_better", [True, False])
async def test_a_canary_is_kept_only_if_it_is_better(is_better: bool, tmp_path: Path) -> None:
    async def behave(wire: Wire) -> None:
        slow = wire.upstream.name == "b" and gateway.backend("b").said.method is Method.SUFFIX and not is_better
        await asyncio.sleep(0.03 if slow or (is_better and wire.upstream.name != "b") else 0.01)
        await well(wire)

    methods = {"a": "eagle3", "b": "eagle3", "c": "baseline"}
    async with start_gateway(methods, behaviour=behave, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        line = ["--url", gateway.url, "--admin-key", ADMIN_KEY, "--block", "10s", "--replica", "b"]
        suffix = ["--with", '{"method": "suffix", "num_speculative_tokens": 24}']
        command = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, ["canary", *line, *suffix]))
        await gateway.until(lambda: gateway.backend("b").health.state is State.DRAINING)
        gateway.backend("b").said = Speculation(Method.SUFFIX, DraftSchedule(24))
        await gateway.until(lambda: bool(gateway.gateway.relay.router._narrowing))
        assert (await found(gateway))["arms"].keys() == {"a", "b"}
        await ask_until(gateway, "decided")
        result = await command
        assert result.exit_code == (0 if is_better else 1), result.output
        assert ("Keep it." in result.stdout) is is_better
        assert (gateway.backend("b").health.state is State.UP) is is_better


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--replica", "x", "--with", "{}"], "no replica x; there are: m/a, m/b"),
        (["--replica", "a", "--with", "{]"], "--with is no JSON"),
        (["--replica", "a", "--with", '{"method": "suffix"}'], "--with lacks num_speculative_tokens"),
        (["--replica", "a", "--with", "{}"], "no other replica that is up serves as a does"),
    ],
)
async def test_a_canary_that_cannot_be_compared_changes_nothing(options: list[str], problem: str) -> None:
    async with start_gateway() as gateway:
        line = ["canary", "--url", gateway.url, "--admin-key", ADMIN_KEY, *options]
        result = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert result.exit_code == 2, result.output
        assert problem in result.stderr
        assert gateway.backend("a").health.state is State.UP
