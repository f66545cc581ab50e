"""A comparison on a running gateway: it gives requests to arms, decides, ends by itself, and outlives its process."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from backends.draft_schedule import DraftSchedule, Speculation
from backends.health import State
from backends.speculation import Method
from gateway.cli.app import app
from gateway.config.settings import PoolSettings
from gateway.rooms.compare import room
from gateway.rooms.compare.definition import block_for
from gateway.rooms.compare.running import Running as Comparison
from policies.experiment.experiment import BLOCKS, Plan, Sums
from policies.features.request import ANY_REQUEST
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, start_gateway
from tests.support.upstream import Wire, well
from tests.support.waiting import eventually_async

METHODS = {"a0": "baseline", "a1": "baseline", "b0": "eagle3", "b1": "eagle3"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(autouse=True)
def judged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have comparisons judged at each tick."""
    monkeypatch.setattr(room, "_JUDGE_S", 0.0)


def teach(gateway: Running, **seconds: float) -> None:
    """Add blocks of time in which the arms took so many seconds per unit of work, as another gateway would."""
    (present,) = comparisons(gateway)
    rng = Random(1)
    for number in range(40):
        for at, arm in enumerate(present.definition.replicas):
            took = [*seconds.values()][at] * rng.uniform(0.95, 1.05)
            work = 5000.0 * rng.uniform(0.8, 1.2)
            sums = Sums(took * work, work, 50.0, work, 1.0, 50.0, 100.0, 5.0, 50.0, took * work, work, work)
            present._statistics.add(BLOCKS, (present.plan.id, str(number), arm, "other"), *sums)


def known(present: Comparison, number: int, arm: str, **sums: float) -> None:
    """Add what one arm came to in a block, as another gateway would."""
    present._statistics.add(BLOCKS, (present.plan.id, str(number), arm, "other"), *Sums(weight=1.0, **sums))


def comparisons(gateway: Running) -> list[Comparison]:
    (found,) = [each for each in gateway.gateway.rooms if isinstance(each, room.CompareRoom)]
    return [*found.comparisons.values()]


async def start(gateway: Running, **fields: Any) -> httpx.Response:
    asked = {"a": "baseline", "b": "eagle3", "block_s": 10, **fields}
    return await gateway.client.post("/admin/compare/start", json=asked, headers=ADMIN)


async def found(gateway: Running) -> dict[str, Any]:
    answer = (await gateway.client.get("/admin/compare", headers=ADMIN)).json()["models"]
    return answer[MODEL] if answer else {}


async def until_stage(gateway: Running, stage: str) -> None:
    """Wait until the comparison is at a stage."""

    async def is_there() -> bool:
        return bool((await found(gateway)).get("stage") == stage)

    await eventually_async(is_there)


def narrowing(gateway: Running) -> bool:
    return bool(gateway.gateway.relay.router._narrowing)


async def test_the_better_arm_is_found_and_the_comparison_ends(tmp_path: Path) -> None:
    state = {"file": str(tmp_path / "state.sqlite")}
    async with start_gateway(METHODS, state=state) as gateway:
        assert await found(gateway) == {}
        assert (await start(gateway)).status_code == 200
        again = await start(gateway)
        assert again.status_code == 409
        assert "gateway compare stop" in again.json()["error"]["message"]
        await gateway.until(lambda: narrowing(gateway))
        assert {(await gateway.chat()).headers["x-gateway-backend"] for _ in range(40)} == METHODS.keys()
        assert (await found(gateway))["stage"] == "running"
        teach(gateway, baseline=0.01, eagle3=0.008)
        await until_stage(gateway, "decided")
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
        assert not narrowing(gateway), "the policy chooses among all again"

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


async def test_a_comparison_goes_on_after_a_restart_until_it_is_stopped(tmp_path: Path) -> None:
    state = {"file": str(tmp_path / "state.sqlite")}
    async with start_gateway(METHODS, state=state) as gateway:
        assert (await start(gateway, until=0.0)).status_code == 200
        await gateway.until(lambda: narrowing(gateway))
    async with start_gateway(METHODS, state=state) as gateway:
        await gateway.until(lambda: narrowing(gateway))
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
        ({"a": "egle3"}, "no replica has the name, the method or the source 'egle3'; did you mean 'eagle3'?"),
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


@pytest.mark.parametrize("is_better", [True, False])
async def test_a_canary_is_kept_only_if_it_is_better(is_better: bool, tmp_path: Path) -> None:
    methods = {"a": "eagle3", "b": "eagle3", "c": "baseline"}
    async with start_gateway(methods, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        line = ["--url", gateway.url, "--admin-key", ADMIN_KEY, "--block", "10s", "--replica", "b"]
        suffix = ["--with", '{"method": "suffix", "num_speculative_tokens": 24}']
        command = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, ["canary", *line, *suffix]))
        await gateway.until(lambda: gateway.backend("b").health.state is State.DRAINING)
        gateway.backend("b").said = Speculation(Method.SUFFIX, DraftSchedule(24))
        await gateway.until(lambda: narrowing(gateway))
        assert (await found(gateway))["arms"].keys() == {"a", "b"}
        teach(gateway, a=0.01, b=0.008 if is_better else 0.012)
        result = await command
        assert result.exit_code == (0 if is_better else 1), result.output
        assert ("Keep it." in result.stdout) is is_better
        assert (gateway.backend("b").health.state is State.UP) is is_better


async def test_depths_take_turns_and_the_best_is_found(tmp_path: Path) -> None:
    methods = {"a": "eagle3", "b": "eagle3"}
    async with start_gateway(methods, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        without = await start(gateway, a="", b="", depths=[0, 3])
        assert "no replica has draft_depth: true" in without.json()["error"]["message"]
        for name in methods:
            gateway.backend(name).draft_depth = True
        for wrong, problem in (([0], "two depths at least"), ([0, 9], "draft 3 tokens at most")):
            answer = await start(gateway, a="", b="", depths=wrong)
            assert problem in answer.json()["error"]["message"]
        both = await start(gateway, depths=[0, 3])
        assert "either two arms, or depths, or policies" in both.json()["error"]["message"]
        assert (await start(gateway, a="", b="", depths=[0, 3])).status_code == 200
        await gateway.until(lambda: narrowing(gateway))
        (present,) = comparisons(gateway)
        for number in range(30):  # each replica has each depth in turn, but in blocks of time as usual
            present._experiment._number = number
            present._experiment._shares = present.plan.shares(number)
            arms = {present.depth(name) for name in methods}
            assert arms == ({None} if present.plan.shares(number) is None else {0, 3})
        assert (await gateway.chat()).status_code == 200
        teach(gateway, none=0.01, three=0.008)
        await until_stage(gateway, "decided")
        ended = await found(gateway)
        assert ended["findings"][0]["better"] == "k = 3"
        assert '"num_speculative_tokens": 3' in ended["change"]


async def test_the_depth_stands_in_the_body_that_the_engine_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Plan, "shares", lambda self, number: (1.0, 1.0))
    asked: list[Any] = []

    async def kept(wire: Wire) -> None:
        asked.append(wire.seen.json["vllm_xargs"]["draft_tokens"])
        await well(wire)

    methods = {"a": "eagle3", "b": "eagle3"}
    async with start_gateway(methods, behaviour=kept, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        for name in methods:
            gateway.backend(name).draft_depth = True
        assert (await start(gateway, a="", b="", depths=[0, 3])).status_code == 200
        await gateway.until(lambda: narrowing(gateway))
        for _ in range(30):
            assert (await gateway.chat()).status_code == 200
        assert set(asked) == {0, 3}


async def test_policies_take_turns_over_the_whole_pool_and_the_better_is_named(tmp_path: Path) -> None:
    state = {"file": str(tmp_path / "state.sqlite")}
    async with start_gateway(METHODS, state=state, policy={"name": "learned"}) as gateway:
        for wrong, problem in (
            (["least_loaded", "random"], "name the present policy and another one, such as learned,least_loaded"),
            (["learned", "leastloaded"], "there is no policy 'leastloaded'; did you mean 'least_loaded'?"),
            (["learned", "static"], "static needs settings"),
            (["learned", "lmetric"], "lmetric needs settings, or all requests to learn from"),
        ):
            answer = await start(gateway, a="", b="", policies=wrong)
            assert problem in answer.json()["error"]["message"]
        assert (await start(gateway, a="", b="", policies=["learned", "least_loaded"])).status_code == 200
        await gateway.until(lambda: narrowing(gateway))
        (present,) = comparisons(gateway)
        chosen = set()
        for number in range(present.plan.count, 40):
            present._experiment._number = number
            present._experiment._shares = present.plan.shares(number)
            request, pool = ANY_REQUEST, [*gateway.gateway.pool.of(MODEL)]
            assert [*present.narrow(request, pool)] == pool, "each chooses among all replicas"
            present._experiment._number = number
            decision = present.choosing(gateway.gateway.models[MODEL].policy)(request, pool)
            assert decision.policy == present.plan.arm_of(0, number)
            chosen.add(decision.policy)
        assert chosen == {"learned", "least_loaded"}
        assert (await gateway.chat()).status_code == 200
        teach(gateway, learned=0.012, least_loaded=0.01)
        await until_stage(gateway, "decided")
        ended = await found(gateway)
        assert ended["change"] == "policy: least_loaded"
        assert ended["cost"] is None


async def test_an_arm_that_misses_its_objective_or_takes_far_longer_ends_it(tmp_path: Path) -> None:
    async with start_gateway(METHODS, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        for harm, sentence in (
            ({"missed": 20.0}, "40% of the requests of eagle3 missed their objective, 0% of the others."),
            ({"seconds": 30.0}, "Requests of eagle3 take more than 3.0 times as long as those of baseline"),
        ):
            assert (await start(gateway)).status_code == 200
            (present,) = comparisons(gateway)
            usual = {"seconds": 10.0, "work": 1000.0, "requests": 50.0, "arrived_work": 1000.0, "chosen": 50.0}
            usual |= {"replicas": 100.0, "judged": 50.0}
            for number in range(3):
                known(present, number, "baseline", **usual)
                known(present, number, "eagle3", **usual | harm)
            await until_stage(gateway, "harm")
            ended = await found(gateway)
            assert sentence in ended["sentence"]
            assert "start b0, b1 as a0" in ended["change"]


async def test_a_finding_holds_while_the_pool_serves_so(tmp_path: Path) -> None:
    async with start_gateway(METHODS, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        (comparing,) = [each for each in gateway.gateway.rooms if isinstance(each, room.CompareRoom)]

        def rules() -> list[str]:
            return [each.rule for each in comparing.findings(MODEL)]

        assert (await start(gateway, b="b*")).status_code == 200
        teach(gateway, baseline=0.01, eagle3=0.008)
        await until_stage(gateway, "decided")
        assert rules() == ["compared"]
        assert (await start(gateway, b="b*")).status_code == 200
        assert rules() == ["comparing", "compared"], "what is asked again is known until it is answered"
        assert (await gateway.client.post("/admin/compare/stop", json={}, headers=ADMIN)).status_code == 200
        assert rules() == ["compared"]
        assert (await start(gateway, a="a0", b="a1")).status_code == 200
        assert comparing.findings(MODEL)[0].title.endswith("5 requests or more")
        assert rules() == ["comparing", "compared"], "an older one is not forgotten"
        suffix = Speculation(Method.SUFFIX, DraftSchedule(24))
        for name in ("a0", "a1"):
            gateway.backend(name).said = suffix
            gateway.backend(name).observe({}, suffix)
        assert rules() == ["comparing"], "no replica serves any more as the other arm did"


@pytest.mark.parametrize("fields", [{}, {"a": "", "b": "", "policies": ["learned", "least_loaded"]}])
async def test_it_ends_once_something_serves_otherwise_than_at_its_start(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    state = {"file": str(tmp_path / "state.sqlite")}
    async with start_gateway(METHODS, policy={"name": "learned"}, state=state) as gateway:
        assert (await start(gateway, **fields)).status_code == 200
        (present,) = comparisons(gateway)
        pool = [*gateway.gateway.pool.of(MODEL)]
        assert present.definition.changed(pool, "learned") == ""
        gateway.backend("b0").observe({}, Speculation(Method.EAGLE3, DraftSchedule(0)))
        assert present.definition.changed(pool, "learned") == "", "an engine that has not told k yet"
        if fields:
            assert "since random is the policy now" in present.definition.changed(pool, "random")
            return
        gateway.backend("b0").observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
        await until_stage(gateway, "stopped")
        sentence = (await found(gateway))["sentence"]
        assert sentence.startswith("It was stopped, since b0 serves as suffix:24 now. Nothing is known yet")


def _is_another(gateway: Running, before: Comparison) -> bool:
    return comparisons(gateway)[0] is not before


async def test_a_pool_can_compare_by_itself_two_methods_at_a_time(tmp_path: Path) -> None:
    methods = {"a": "baseline", "b": "eagle3", "c": "suffix"}
    compare = {"every_s": 0.001, "until": 0.5}
    pairs: list[set[str]] = []
    async with start_gateway(methods, state={"file": str(tmp_path / "state.sqlite")}, compare=compare) as gateway:
        assert await found(gateway) == {}, "it begins once there are requests"
        assert (await gateway.chat()).status_code == 200
        for _ in range(4):
            await until_stage(gateway, "running")
            (present,) = comparisons(gateway)
            pairs.append({*present.definition.replicas})
            teach(gateway, one=0.01, other=0.01)
            await gateway.until(partial(_is_another, gateway, present))
    assert pairs[0] == pairs[3]
    assert {frozenset(each) for each in pairs} == {frozenset(pair) for pair in combinations(methods.values(), 2)}


@pytest.mark.parametrize(("mean_s", "block_s"), [(None, 10.0), (0.2, 10.0), (3.01, 31.0), (1000.0, 3600.0)])
def test_blocks_fit_the_requests_so_far(mean_s: float | None, block_s: float) -> None:
    assert block_for(mean_s) == block_s


async def test_blocks_that_turn_out_too_short_are_made_longer_unless_they_were_asked_for(tmp_path: Path) -> None:
    async with start_gateway(METHODS, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        assert (await gateway.chat()).status_code == 200
        for asked, longer in ((None, 100.0), (12, 12.0)):
            assert (await start(gateway, block_s=asked)).status_code == 200
            (present,) = comparisons(gateway)
            assert present.plan.block_s == (asked or 10.0)
            for _ in range(100):
                present._experiment._blocks.observe(0.0, 10.0, 1.0, "", 0)
            await gateway.until(partial(_has_blocks_of, gateway, longer))
            assert (await found(gateway))["stage"] == "running"
            stopped = await gateway.client.post("/admin/compare/stop", json={}, headers=ADMIN)
            assert stopped.status_code == 200


async def test_blocks_with_too_few_requests_are_made_longer_until_they_can_be_no_longer(tmp_path: Path) -> None:
    async with start_gateway(METHODS, state={"file": str(tmp_path / "state.sqlite")}) as gateway:
        assert (await start(gateway, block_s=None)).status_code == 200
        for block_s in (10.0, 40.0, 160.0, 640.0, 2560.0, 3600.0):
            (present,) = comparisons(gateway)
            assert present.plan.block_s == block_s
            for number in range(4):
                for arm in present.definition.replicas:
                    known(present, number, arm, requests=2.0, chosen=2.0)
            present.judge(0.0)
            await gateway.until(partial(_has_blocks_of, gateway, min(4 * block_s, 3600.0)))
        assert present.fitted() is None


def _has_blocks_of(gateway: Running, block_s: float) -> bool:
    return comparisons(gateway)[0].plan.block_s == block_s


@pytest.mark.parametrize(("state", "problem"), [("none", "models.m.compare"), ({"file": "x"}, "")])
def test_a_pool_that_compares_by_itself_needs_a_state(state: object, problem: str) -> None:
    model = {"backends": {"a": {"method": "baseline", "url": "http://127.0.0.1:1"}}, "compare": {}}
    settings = PoolSettings.model_validate({"models": {MODEL: model}, "state": state})
    assert room.CompareRoom.problem(settings).partition(" ")[0] == problem
