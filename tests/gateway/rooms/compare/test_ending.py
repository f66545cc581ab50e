"""How comparisons end, whatever becomes of what they compare; the blocks of time that they have until then."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, Speculation
from backends.health import State
from backends.speculation import Method
from gateway.rooms.compare import room
from gateway.rooms.compare.definition import WrongArmsError, begun, block_for
from gateway.rooms.compare.running import Running as Comparison
from gateway.rooms.compare.settings import ComparisonSettings
from policies.balancing.least_loaded import LeastLoaded
from policies.experiment.evidence import BLOCKS, REST, USUAL, Evidence, Sums
from policies.experiment.verdict import Stage
from policies.statistics import Statistics
from tests.gateway.conftest import MODEL, Running
from tests.gateway.rooms.compare.support import (
    begin,
    comparisons,
    found,
    known,
    room_of,
    stop,
    teach,
    until_stage,
    with_state,
)


@pytest.mark.slow
async def test_an_arm_that_misses_its_objective_or_takes_far_longer_ends_it(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        for harm, sentence in (
            ({"missed": 20.0}, "40% of the requests of eagle3 missed their objective, 0% of the others."),
            ({"seconds": 30.0}, "Requests of eagle3 take more than 3.0 times as long as those of baseline"),
        ):
            present = await begin(gateway)
            usual = {"seconds": 10.0, "work": 1000.0, "requests": 50.0, "arrived_work": 1000.0, "chosen": 50.0}
            usual |= {"replicas": 100.0, "judged": 50.0}
            for number in range(3):
                known(present, number, "baseline", **usual)
                known(present, number, "eagle3", **usual | harm)
            await until_stage(gateway, "harm")
            ended = await found(gateway)
            assert sentence in ended["sentence"]
            assert "start b0, b1 as a0" in ended["change"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["replica", "policy"])
async def test_a_comparison_of_what_is_no_longer_there_ends(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"a": "", "b": "", "policies": ["learned", "least_loaded"]} if what == "policy" else {"b": "b0"}
    async with with_state(tmp_path, policy={"name": "learned"}) as gateway:
        present, comparing = await begin(gateway, **arms), room_of(gateway)
        gateway.backend("b1").observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))  # in no arm
        await until_stage(gateway, "running")
        if what == "replica":  # as after a reload
            gateway.backend("b0").observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
        else:
            gateway.gateway.models[MODEL].policy = LeastLoaded(LeastLoaded.Settings())
        teach(present, one=0.01, other=0.005)
        for _ in range(20):  # another gateway may have read the pool file later
            await comparing._judge()
        assert (await found(gateway))["stage"] == "running", "nor is anything decided"
        monkeypatch.setattr(room, "_VOID_S", 0.0)
        await until_stage(gateway, "stopped")


async def test_a_comparison_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_state(tmp_path) as gateway:
        comparing = room_of(gateway)
        present = await begin(gateway)
        begun, may_end, document = Event(), Event(), present.document

        def slow() -> dict[str, Any]:
            begun.set()
            assert may_end.wait(10.0)
            return document()

        with monkeypatch.context() as patched:
            patched.setattr(present, "document", slow)
            late = asyncio.create_task(comparing._end(MODEL, Stage.STOPPED))
            await gateway.until(begun.is_set)
        await comparing._end(MODEL, Stage.ALIKE)
        may_end.set()
        await late
        assert (await found(gateway))["stage"] == "alike"


@pytest.mark.slow
async def test_what_fails_with_one_model_keeps_no_other_from_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with with_state(tmp_path) as gateway:
        comparing = room_of(gateway)
        own = await begin(gateway)
        broken = Comparison(own.definition, own._statistics)
        monkeypatch.setattr(broken, "fitted", partial(next, iter(())))
        comparing.comparisons = {"broken": broken, MODEL: own}
        gateway.gateway.models["broken"] = gateway.gateway.models[MODEL]
        teach(own, baseline=0.01, eagle3=0.008)
        await gateway.until(lambda: not comparing.comparisons[MODEL].is_running)
        del gateway.gateway.models["broken"]


@pytest.mark.slow
async def test_a_faster_arm_that_is_harmed_is_advised_nowhere(tmp_path: Path) -> None:
    methods = {"a": "eagle3", "b": "eagle3"}
    async with with_state(tmp_path, methods) as gateway:
        for name in methods:
            gateway.backend(name).draft_depth = True
        present = await begin(gateway, a="", b="", depths=[0, 3])
        for number in range(3):
            known(present, number, "k = 3", chosen=50.0, failed=20.0)
        teach(present, none=0.01, three=0.008)
        await until_stage(gateway, "harm")
        ended = await found(gateway)
        assert (ended["harmed"], ended["findings"][0]["better"]) == ("k = 3", "k = 3")
        assert ended["change"] == """--speculative-config '{..., "num_speculative_tokens": 0}'"""
        (advice,) = (await gateway.admin("advice"))["models"][MODEL]["findings"]
        assert "of the requests of k = 3 failed" in advice["title"]
        assert (advice["gain"], advice["change"]) == (None, ended["change"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("for_s", "asked", "block_s"),
    [(7200.0, None, 10.0), (86_400.0, None, 85.0), (86_400.0, 10.0, 85.0), (None, 900.0, 900.0)],
)
def test_a_comparison_of_days_has_no_more_blocks_than_are_kept(
    for_s: float | None, asked: float | None, block_s: float
) -> None:
    question = ComparisonSettings(a="a", b="b", for_s=for_s, block_s=asked)
    pool = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1") for name in "ab"]
    for each in pool:
        each.health = replace(each.health, state=State.UP)
    plan = begun(question, pool, "least_loaded", 0.0, 1.0).plan()
    assert plan.block_s == block_s
    names = [*plan.arms, REST, USUAL]
    statistics = Statistics([BLOCKS], lambda: 86_400.0)  # all of it on one day
    for number in range(round((for_s or 0.0) / block_s)):
        for name in names:
            statistics.add(BLOCKS, (plan.id, str(number), name, "one"), *Sums(weight=1.0))
    blocks = Evidence(plan, statistics).blocks.values()
    assert all([*each] == sorted(names) for each in blocks)


@pytest.mark.parametrize(("mean_s", "block_s"), [(None, 10.0), (0.2, 10.0), (3.01, 31.0), (1000.0, 3600.0)])
def test_blocks_fit_the_requests_so_far(mean_s: float | None, block_s: float) -> None:
    assert block_for(mean_s) == block_s


@pytest.mark.slow
async def test_blocks_that_turn_out_too_short_are_made_longer_unless_they_were_asked_for(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        assert (await gateway.chat()).status_code == 200
        for asked, longer in ((None, 100.0), (12, 12.0)):
            present = await begin(gateway, block_s=asked)
            assert present.plan.block_s == (asked or 10.0)
            for _ in range(100):
                present._experiment._blocks.observe(0.0, 10.0, 1.0, "", 0)
            await gateway.until(partial(_has_blocks_of, gateway, longer))
            assert (await found(gateway))["stage"] == "running"
            await stop(gateway)


@pytest.mark.slow
async def test_what_was_seen_stays_when_traffic_gets_slower_by_and_by(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        assert (await gateway.chat()).status_code == 200
        present = await begin(gateway, block_s=None)
        for number, seconds, block_s, blocks in ((11, 1.5, 15.0, 0), (12, 2.5, 25.0, 12), (1, 20.0, 200.0, 13)):
            for each in range(number):
                known(present, each, "baseline")
            present.judge(0.0)
            for _ in range(1000):
                present._experiment._blocks.observe(0.0, seconds, 1.0, "", 0)
            await gateway.until(partial(_has_blocks_of, gateway, block_s))
            assert comparisons(gateway) == [present]
            present.judge(0.0)
            assert (await found(gateway))["blocks"] == blocks


@pytest.mark.slow
async def test_a_comparison_of_quiet_and_busy_hours_takes_all_of_its_time(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        present = await begin(gateway, whole=True)
        teach(present, baseline=0.01, eagle3=0.005)
        assert present.judge(0.0).sentence.startswith("So far, eagle3 takes ")
        assert (await found(gateway))["stage"] == "running"
        present.definition = present.definition.model_copy(update={"began_s": 0.0})
        await until_stage(gateway, "decided")
        assert (await found(gateway))["sentence"].startswith("eagle3 takes ")


@pytest.mark.slow
async def test_a_comparison_ends_though_the_longest_blocks_are_too_short(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        present = await begin(gateway, block_s=None)
        for _ in range(100):
            present._experiment._blocks.observe(0.0, 600.0, 1.0, "", 0)
        await gateway.until(partial(_has_blocks_of, gateway, 3600.0))
        (present,) = comparisons(gateway)
        for _ in range(100):
            present._experiment._blocks.observe(0.0, 600.0, 1.0, "", 0)
        present.definition = present.definition.model_copy(update={"began_s": 0.0})
        await until_stage(gateway, "over")


@pytest.mark.slow
async def test_blocks_with_too_few_requests_are_made_longer_until_they_can_be_no_longer(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        present = await begin(gateway, block_s=None)
        for block_s in (10.0, 40.0, 160.0, 640.0, 2560.0, 3600.0):
            assert present.plan.block_s == block_s
            for number in range(4):
                for arm in present.definition.replicas:
                    known(present, number, arm, requests=2.0, chosen=2.0)
            present.judge(0.0)
            await gateway.until(partial(_has_blocks_of, gateway, min(4 * block_s, 3600.0)))
        assert present.fitted() is None


def _has_blocks_of(gateway: Running, block_s: float) -> bool:
    return comparisons(gateway)[0].plan.block_s == block_s


@pytest.mark.slow
async def test_a_finding_holds_while_the_pool_serves_so(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        comparing = room_of(gateway)

        def rules() -> list[str]:
            return [each.rule for each in comparing.findings(MODEL)]

        teach(await begin(gateway, b="b*"), baseline=0.01, eagle3=0.008)
        await until_stage(gateway, "decided")
        assert rules() == ["compared"]
        await begin(gateway, b="b*")
        assert rules() == ["compared"], "what is asked again is known until it is answered"
        await stop(gateway)
        assert rules() == ["compared"]
        await begin(gateway, a="a0", b="a1")
        assert rules() == ["compared"], "an older one is not forgotten"
        suffix = Speculation(Method.SUFFIX, DraftSchedule(24))
        for name in ("a0", "a1"):
            gateway.backend(name).said = suffix
            gateway.backend(name).observe({}, suffix)
        assert rules() == [], "no replica serves any more as the other arm did"


@pytest.mark.slow
async def test_what_to_change_is_not_taken_from_a_replica_that_serves_otherwise_by_now(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        teach(await begin(gateway), baseline=0.01, eagle3=0.008)
        await until_stage(gateway, "decided")
        for name, change in (("b0", "start a0, a1 as b1"), ("b1", "")):
            gateway.backend(name).observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
            assert change in (seen := (await found(gateway))["change"])
            assert "suffix" not in seen
        assert not seen


def test_policies_are_not_compared_over_one_replica() -> None:
    alone = [Backend("a", "m", Method.BASELINE, "http://127.0.0.1:8001")]
    question = ComparisonSettings(policies=["learned", "least_loaded"])
    with pytest.raises(WrongArmsError, match="policies choose among replicas, and there is one"):
        begun(question, alone, "learned", 0.0)
