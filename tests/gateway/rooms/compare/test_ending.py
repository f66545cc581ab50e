"""How comparisons end, whatever becomes of what they compare; the blocks of time that they have until then."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from backends.draft_schedule import DraftSchedule, Speculation
from backends.speculation import Method
from gateway.rooms.compare import room
from gateway.rooms.compare.definition import Definition
from gateway.rooms.compare.running import Running as Comparison
from gateway.state.documents import Document
from policies.balancing.least_loaded import LeastLoaded
from policies.experiment.verdict import Stage, Verdict
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
async def test_an_arm_that_misses_its_objective_or_takes_far_longer_ends_it(gateway: Running) -> None:
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
        why = "least_loaded is the policy now" if what == "policy" else "b0 serves as suffix:24 now"
        running, comparing = await begin(gateway, **arms), room_of(gateway)
        gateway.backend("b1").observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))  # in no arm
        await until_stage(gateway, "running")
        if what == "replica":  # as after a reload
            gateway.backend("b0").observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
        else:
            gateway.gateway.models[MODEL].policy = LeastLoaded(LeastLoaded.Settings())
        teach(running, one=0.01, other=0.005)
        for _ in range(20):  # another gateway may have read the pool file later
            await comparing._judge()
        present = await found(gateway)
        assert present["stage"] == "running", "nor is anything decided"
        assert present["sentence"].endswith(f" But {why}: it will be stopped unless that ends.")
        monkeypatch.setattr(room, "_VOID_S", 0.0)
        await until_stage(gateway, "stopped")
        assert (await found(gateway))["sentence"].startswith(f"It was stopped, since {why}. ")


@pytest.mark.slow
async def test_what_fails_with_one_model_keeps_no_other_from_its_end(
    monkeypatch: pytest.MonkeyPatch, gateway: Running
) -> None:
    comparing = room_of(gateway)
    own = await begin(gateway)
    broken = Comparison(own.definition, own._statistics)
    monkeypatch.setattr(broken, "fitted", partial(next, iter(())))
    comparing.comparisons = {"broken": broken, MODEL: own}
    gateway.gateway.models["broken"] = gateway.gateway.models[MODEL]
    teach(own, baseline=0.01, eagle3=0.008)
    await gateway.until(lambda: not comparing.comparisons[MODEL].is_running)
    del gateway.gateway.models["broken"]


@pytest.mark.parametrize("removed", ["gone", MODEL])
async def test_of_a_model_that_a_reload_removed_nothing_is_shown(gateway: Running, removed: str) -> None:
    own, models = await begin(gateway), gateway.gateway.models
    room_of(gateway).comparisons["gone"] = own
    gateway.gateway.models = {name: model for name, model in models.items() if name != removed}
    shown = await gateway.admin("compare")
    gateway.gateway.models = models
    assert [*shown["models"]] == [name for name in (MODEL,) if name != removed]


async def test_a_verdict_ends_no_other_comparison(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    comparing, own = room_of(gateway), await begin(gateway)
    other, decided = Comparison(own.definition, own._statistics), replace(own.judge(0.0), stage=Stage.DECIDED)

    def judge(_: float) -> Verdict:
        comparing.comparisons[MODEL] = other  # begun meanwhile
        return decided

    monkeypatch.setattr(own, "judge", judge)
    await comparing._judge_one(MODEL, own)
    assert comparing.comparisons[MODEL] is other
    assert other.is_running


async def test_what_another_gateway_has_written_since_stays(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = gateway.gateway.state.documents
    put = documents.put

    async def put_and_read(name: str, text: str, *, after: int) -> Document:
        written = await put(name, text, after=after)
        ended = Definition.model_validate_json(text).model_copy(update={"ended_s": 1.0, "stage": Stage.STOPPED})
        later = written._replace(version=written.version + 1, text=ended.model_dump_json())
        documents.settle({name: (*documents.history(name), later)})
        return written

    monkeypatch.setattr(documents, "put", put_and_read)
    assert not (await begin(gateway)).is_running


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
async def test_a_comparison_of_quiet_and_busy_hours_takes_all_of_its_time(gateway: Running) -> None:
    present = await begin(gateway, whole=True)
    teach(present, baseline=0.01, eagle3=0.005)
    assert present.judge(0.0).sentence.startswith("So far, eagle3 takes ")
    assert (await found(gateway))["stage"] == "running"
    present.definition = present.definition.model_copy(update={"began_s": 0.0})
    await until_stage(gateway, "decided")
    assert (await found(gateway))["sentence"].startswith("eagle3 takes ")


@pytest.mark.slow
async def test_blocks_with_too_few_requests_are_made_longer_until_they_can_be_no_longer(gateway: Running) -> None:
    present = await begin(gateway, block_s=12)
    for _ in range(100):
        present._experiment._blocks.observe(0.0, 100.0, 1.0, "", 0)
    await room_of(gateway)._judge()
    assert _has_blocks_of(gateway, 12.0), "they were asked for"
    await stop(gateway)
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
async def test_a_finding_holds_while_the_pool_serves_so(gateway: Running) -> None:
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
        gateway.backend(name).declared = suffix
        gateway.backend(name).observe({}, suffix)
    assert rules() == [], "no replica serves any more as the other arm did"


@pytest.mark.slow
async def test_what_to_change_is_not_taken_from_a_replica_that_serves_otherwise_by_now(gateway: Running) -> None:
    teach(await begin(gateway), baseline=0.01, eagle3=0.008)
    await until_stage(gateway, "decided")
    for name, change in (("b0", "start a0, a1 as b1"), ("b1", "")):
        gateway.backend(name).observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
        assert change in (seen := (await found(gateway))["change"])
        assert "suffix" not in seen
    assert not seen
