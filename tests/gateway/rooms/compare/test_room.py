"""A comparison on a running gateway: it gives requests to arms, decides, ends by itself, and outlives its process."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.draft_schedule import DraftSchedule, Speculation
from backends.health import State
from backends.speculation import Method
from gateway.cli.app import app
from gateway.config.pool_file import PoolFile
from gateway.rooms.compare import room
from policies.balancing.least_loaded import LeastLoaded
from policies.experiment.plan import Plan
from policies.features.request import ANY_REQUEST
from tests.gateway.conftest import ADMIN, MODEL, Running
from tests.gateway.rooms.compare.support import (
    METHODS,
    begin,
    comparisons,
    found,
    narrowing,
    room_of,
    start,
    stop,
    teach,
    until_stage,
    with_state,
)
from tests.support.waiting import eventually_async


@pytest.mark.slow
async def test_the_better_arm_is_found_and_the_comparison_ends(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        assert await found(gateway) == {}
        present, again = await begin(gateway), await start(gateway)
        assert again.status_code == 409
        assert "gateway compare stop" in again.json()["error"]["message"]
        await gateway.until(lambda: narrowing(gateway))
        assert {(await gateway.chat()).headers["x-gateway-backend"] for _ in range(40)} == METHODS.keys()
        assert (await found(gateway))["stage"] == "running"
        teach(present, baseline=0.01, eagle3=0.008)
        await until_stage(gateway, "decided")
        (advice,) = (await gateway.admin("advice"))["models"][MODEL]["findings"]
        assert advice["rule"] == "compared"
        assert advice["gain"]["low"] > 0.0
        seen = await found(gateway)
        assert seen["findings"][0]["better"] == "eagle3"
        assert seen["findings"][0]["at_mean"]["high"] < 1.0
        assert seen["arms"]["baseline"]["replicas"] == ["a0", "a1"]
        assert seen["sentence"].startswith("eagle3 takes ")
        assert "start a0, a1 as b0" in seen["change"]
        assert '"num_speculative_tokens": 3' in seen["change"]
        assert not narrowing(gateway), "the policy chooses among all again"

        assert f"{MODEL}, decided after" in (await gateway.command("compare", "status")).stdout
        page = tmp_path / "page.html"
        written = await gateway.command("compare", "report", str(page))
        assert written.exit_code == 0, written.output
        served = await gateway.client.get("/admin/compare/report", headers=ADMIN)
        assert served.text == page.read_text("utf-8")
        assert seen["sentence"] in served.text
        assert "<svg" in served.text

    async with with_state(tmp_path) as gateway:
        assert (await found(gateway))["stage"] == "decided", "it is known after a restart"


async def test_a_decision_names_its_arm_and_how_likely_it_was(gateway: Running) -> None:
    present = await begin(gateway, usual=False, explore=0.0)
    policy, pool = gateway.gateway.models[MODEL].policy, [*gateway.gateway.pool.of(MODEL)]
    alone = policy.choose(ANY_REQUEST, pool[:2])
    for _ in range(20):
        decision = present.choose(policy, ANY_REQUEST, pool)
        assert decision.arm == ("baseline" if decision.backend.startswith("a") else "eagle3")
        assert decision.propensity == 0.5 * alone.propensity
        assert sum(decision.propensities) == 0.5 * sum(alone.propensities)


@pytest.mark.slow
async def test_a_comparison_goes_on_after_a_restart_until_it_is_stopped(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        await begin(gateway, until=0.0)
        await gateway.until(lambda: narrowing(gateway))
    async with with_state(tmp_path) as gateway:
        await gateway.until(lambda: narrowing(gateway))
        ended = await gateway.command("compare", "stop")
        assert ended.exit_code == 0, ended.output
        assert "stopped after" in ended.stdout
        again = await gateway.command("compare", "stop")
        assert again.exit_code == 1
        assert "Nothing of m is being compared." in again.stderr


async def test_what_cannot_be_compared_is_refused(gateway: Running) -> None:
    answer = await start(gateway, a="egle3")
    assert answer.status_code == 400
    assert "did you mean 'eagle3'?" in answer.json()["error"]["message"]
    assert await found(gateway) == {}
    assert (await gateway.client.get("/admin/compare")).status_code == 401


@pytest.mark.parametrize("text", ["2", "2 weeks", "-1h", "h"])
def test_a_time_that_is_none_is_refused_before_anything_has_happened(text: str) -> None:
    result = CliRunner().invoke(app, ["compare", "start", "--a", "x", "--b", "y", "--for", text])
    assert result.exit_code == 2
    assert "is no time; expected 90s, 30m, 2h or 1d" in result.stderr


def test_a_report_is_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.admin.Admin.get", lambda admin, path: {"models": {"m": {}, "n": {}}})
    result = CliRunner().invoke(app, ["compare", "report", str(tmp_path / "page.html")])
    assert result.exit_code == 2
    assert "name one with --model: m, n" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("then", ["better", "worse", "alike", "another", "taken"])
async def test_a_canary_is_kept_only_if_it_is_better(then: str, tmp_path: Path) -> None:
    is_better = then == "better"
    methods = {"a": "eagle3", "b": "eagle3", "c": "baseline"}
    async with with_state(tmp_path, methods) as gateway:
        suffix = '{"method": "suffix", "num_speculative_tokens": 24}'
        line = ("canary", "--block", "10s", "--replica", "b", "--with", suffix)
        command = asyncio.create_task(gateway.command(*line))
        await gateway.until(lambda: gateway.backend("b").health.state is State.DRAINING)
        if then == "taken":
            await begin(gateway, a="a", b="c")
        tried = Speculation(Method.SUFFIX, DraftSchedule(24))
        gateway.backend("b").declared = tried
        gateway.backend("b").observe({}, tried)
        await gateway.until(lambda: narrowing(gateway))
        if then != "taken":
            assert (await found(gateway))["arms"].keys() == {"a", "b"}
        if then == "another":
            await stop(gateway)
            await begin(gateway, a="a", b="c")
        elif then != "taken":
            (present,) = comparisons(gateway)
            present.definition = present.definition.model_copy(update={"until": 0.1})
            teach(present, a=0.01, b={"better": 0.008, "worse": 0.012, "alike": 0.01}[then])
        result = await command
        assert result.exit_code == (0 if is_better else 1), result.output
        assert ("Keep it." in result.stdout) is is_better
        assert ("start its engine as before" in result.stdout) is not is_better
        assert (gateway.backend("b").health.state is State.UP) is is_better


@pytest.mark.slow
async def test_depths_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "shares", lambda self, number: (1.0, 1.0))  # no block is as usual
    methods = {"a": "eagle3", "b": "eagle3"}
    async with with_state(tmp_path, methods) as gateway:
        for name in methods:
            gateway.backend(name).draft_depth = True
        present = await begin(gateway, a="", b="", depths=[0, 3])
        await gateway.until(lambda: narrowing(gateway))
        for _ in range(30):
            assert (await gateway.chat()).status_code == 200
        asked = [seen.json["vllm_xargs"] for upstream in gateway.upstreams.values() for seen in upstream.seen]
        assert {each["draft_tokens"] for each in asked} == {0, 3}, "as the engines are told"
        teach(present, none=0.01, three=0.008)
        await until_stage(gateway, "decided")
        assert not room_of(gateway).findings(MODEL), "they have it"
        pool = gateway.gateway.pool.of(MODEL)
        assert present.definition.advises(pool, "k = 0", "")
        present.definition.depths[1] = 2
        assert not present.definition.advises(pool, "k = 0", ""), "what they have was not compared"


@pytest.mark.slow
async def test_policies_take_turns_over_the_whole_pool_and_the_better_is_named(tmp_path: Path) -> None:
    async with with_state(tmp_path, policy={"name": "learned"}) as gateway:
        present = await begin(gateway, a="", b="", policies=["learned", "least_loaded"])
        await gateway.until(lambda: narrowing(gateway))
        pool, policy = [*gateway.gateway.pool.of(MODEL)], gateway.gateway.models[MODEL].policy
        decision = present.choose(policy, ANY_REQUEST, pool)
        assert decision.policy == decision.arm == present.plan.arm_of(0, present._experiment._number)
        assert decision.propensity > 0.24, "each chooses among all replicas"
        assert (await gateway.chat()).status_code == 200
        teach(present, learned=0.012, least_loaded=0.01)
        await until_stage(gateway, "decided")
        ended = await found(gateway)
        assert ended["change"] == "policy: least_loaded"
        assert ended["cost"] is None
        comparing = room_of(gateway)
        for each in pool:
            each.observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
        (finding,) = comparing.findings(MODEL)
        assert finding.change == ended["change"], "whatever the replicas do"
        assert finding.gain is not None
        assert f"({finding.gain.confidence:.0%}: " in ended["sentence"]
        gateway.gateway.models[MODEL].policy = LeastLoaded(LeastLoaded.Settings())
        assert not comparing.findings(MODEL), "it was followed"


@pytest.mark.slow
async def test_a_pool_can_compare_by_itself_one_pair_after_another(tmp_path: Path) -> None:
    async with with_state(tmp_path, {"a": "baseline", "b": "eagle3"}, compare={"every_s": 0.001}) as gateway:
        assert await found(gateway) == {}, "it begins once there are requests"
        assert (await gateway.chat()).status_code == 200
        await until_stage(gateway, "running")
        (present,) = comparisons(gateway)
        teach(present, one=0.01, other=0.008)
        await gateway.until(lambda: comparisons(gateway) != [present])


@pytest.mark.slow
async def test_why_nothing_is_compared_by_itself_is_said(tmp_path: Path) -> None:
    async with with_state(tmp_path, compare={"a": "nope", "b": "b0"}) as gateway:

        async def says(why: str) -> bool:
            return f"nothing is compared by itself yet: {why}" in (await gateway.command("compare", "status")).output

        await eventually_async(partial(says, "no request has been"))
        assert (await gateway.chat()).status_code == 200
        await eventually_async(partial(says, "no replica has the name, the method or the source 'nope'"))


@pytest.mark.parametrize(("state", "problem"), [("none", "models.m.compare"), ({"file": "x"}, "")])
def test_a_pool_that_compares_by_itself_needs_a_state(state: object, problem: str) -> None:
    model = {"backends": {"a": {"method": "baseline", "url": "http://127.0.0.1:1"}}, "compare": {}}
    settings = PoolFile.model_validate({"models": {MODEL: model}, "state": state})
    assert room.CompareRoom.problem(settings).partition(" ")[0] == problem


async def printed(gateway: Running, *words: str) -> str:
    result = await gateway.command(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_of_a_comparison_that_runs_all_commands_say_so(gateway: Running) -> None:
    assert "a comparison runs" not in await printed(gateway, "explain", "hi")
    asked = ("--a", "baseline", "--b", "eagle3", "--for", "1d")
    assert "Comparing for 1d at most, in blocks of 85 s." in await printed(gateway, "compare", "start", *asked)
    await gateway.until(lambda: narrowing(gateway))
    assert "a comparison runs, which may send it elsewhere" in await printed(gateway, "explain", "hi")
    advised = await printed(gateway, "advise")
    assert f"{MODEL}: nothing to advise." in advised
    assert "baseline and eagle3 are being compared: Nothing is known: " in advised
    for name in ("b0", "b1"):
        assert "is up" not in (await found(gateway))["sentence"]
        await printed(gateway, "drain", name)
    assert (await found(gateway))["sentence"].endswith("No replica of eagle3 is up.")
