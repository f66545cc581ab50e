"""What a running gateway says of the replicas that it needs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import httpx
import pytest

from gateway.rooms.fleet import model, room
from gateway.rooms.fleet.capacity import Targets
from tests.gateway.conftest import ADMIN, MODEL, Running, start_gateway
from tests.support.upstream import END, Wire, delta, usage


async def paced(wire: Wire) -> None:
    """Stream an answer of a token every three milliseconds."""
    await wire.stream(*[delta("word ")] * 20, usage(50, 20), END, pause_s=0.003)


def series(page: str, name: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page.splitlines() if line.startswith(f"{name}{{"))
    return {labels: float(value) for labels, _, value in lines}


SERIES = ("gateway_pool_saturation", "gateway_replicas_needed", "gateway_fleet_request_seconds")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play an hour of traffic in a few seconds."""
    monkeypatch.setattr(room, "_MINUTE_S", 0.1)
    monkeypatch.setattr(model, "HOUR_MINUTES", 8)


async def chats(running: Running) -> None:
    await asyncio.gather(*(running.chat(f"hello {number}", temperature=0.0, stream=True) for number in range(10)))


async def asked(running: Running, **parameters: str) -> httpx.Response:
    return await running.client.get("/admin/fleet", params={"model": MODEL, **parameters}, headers=ADMIN)


async def fleet_findings(running: Running) -> list[dict[str, str]]:
    advised = (await running.admin("advice"))["models"][MODEL]
    return [each for each in advised["findings"] if each["rule"] == "fleet"]


@pytest.mark.slow
async def test_it_says_how_many_of_which_method_and_what_they_cost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gateway.rooms.slo_classes", reason="which judges")
    change, missing = model.ModelFleet._change, list[str]()

    def seen(fleet: model.ModelFleet, *of: Any) -> model.Change:
        missing.append(fleet.missing)
        return change(fleet, *of)

    monkeypatch.setattr(model.ModelFleet, "_change", seen)
    policy = {"name": "learned", "seed": 0, "slo": {"tpot_ms": 1000.0}}
    async with start_gateway({"a": "baseline", "b": "ngram"}, policy, behaviour=paced) as running:
        assert (await running.client.get("/admin/fleet", params={"model": MODEL})).status_code == 401
        assert (await asked(running, model="other")).status_code == 404
        answer, too_early = await asked(running), set()
        for _ in range(100):
            await chats(running)
            answer = await asked(running)
            if answer.status_code == 404:
                too_early.add(answer.json()["error"]["message"])
                assert not await fleet_findings(running)
            elif answer.json()["seconds"]["up"] is not None:
                break
        assert any("hour of traffic" in each for each in too_early)
        assert missing[0], "while it is worked out, nobody is told that none are needed"
        said = answer.json()
        (found,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        judged = found.fleets[MODEL].judged
        assert judged.keys() <= {"baseline", "ngram"}
        assert judged
        assert not any(each.missed for each in judged.values())
        assert said["needed"] == sum(said["methods"].values()) == 1
        assert said["saturation"] <= 1.0
        assert 0.05 < said["seconds"]["up"] < 2.0, "as paced"
        assert (await asked(running, method="ngram")).json()["needed"] == said["methods"]["ngram"]
        assert (await asked(running, method="ngarm")).status_code == 404, "not 0 of them"


async def test_what_is_advised_has_its_cost_in_seconds_and_percent() -> None:
    async with start_gateway() as running:
        (found,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        fleet = found.fleets[MODEL] = model.ModelFleet()
        assert found.findings(MODEL) == ()
        fleet.targets, fleet.up = Targets(2.0, 0.03), Counter(baseline=1, ngram=2)
        fleet.advised = model.Change({"baseline": 0, "ngram": 2, "eagle3": 0}, 1.5, 2.1)
        (finding,) = found.findings(MODEL)
        assert finding.title == (
            "2 replicas keep 2 s to the first token and 30 ms for each further one: 1 baseline less"
        )
        assert finding.worth == "requests take 2.10 s in the mean in place of 1.50 s (+40%)"
        fleet.advised = fleet.advised._replace(then_s=math.nan)
        assert found.findings(MODEL) == (), "nothing is taken away without that"
        fleet.advised = fleet.advised._replace(counts={"baseline": 1, "ngram": 3})
        assert "1 ngram more" in found.findings(MODEL)[0].title
        fleet.advised = fleet.advised._replace(counts={"baseline": 1, "ngram": 2})
        assert found.findings(MODEL) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "missing"), [({"name": "learned"}, "set `slo`"), ({"name": "round_robin"}, "learns no step times")]
)
async def test_without_targets_nothing_is_said_and_no_figure_is_left(policy: dict[str, object], missing: str) -> None:
    async with start_gateway(policy=policy) as running:
        (found,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        await running.until(lambda: MODEL in found.fleets and len(found.fleets[MODEL].minutes) > 8)
        answer = await asked(running)
        assert (answer.status_code, missing in answer.json()["error"]["message"]) == (404, True)
        assert not await fleet_findings(running)
        assert (await running.admin("dashboard/snapshot"))["models"][0]["load"] is None
        fleet = model.ModelFleet()
        fleet.saturation, fleet.needed = 0.4, model.Change({"ngram": 2}, 1.0, 1.2)
        found._show(MODEL, fleet)
        page = (await running.client.get("/metrics")).text
        assert [len(series(page, name)) for name in SERIES] == [1, 1, 2]
        fleet.forget("no `slo`")
        found._show(MODEL, fleet)
        page = (await running.client.get("/metrics")).text
        assert all(math.isnan(value) for name in SERIES for value in series(page, name).values())


async def test_of_a_model_that_a_reload_removed_nothing_is_counted() -> None:
    async with start_gateway(policy={"name": "learned"}) as running:
        (found,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        fleet = model.ModelFleet()
        await found._count("removed", fleet, {}, {})
        assert not fleet.minutes
        assert 'model="removed"' not in (await running.client.get("/metrics")).text


def test_what_an_engine_counted_before_it_was_read_is_no_traffic() -> None:
    fleet = model.ModelFleet()
    counts = ({"a": 100}, {"a": 150}, {"a": 160, "b": 10**9}, {"a": None, "b": 10**9 + 5}, {"a": 170, "b": 3}, {"b": 7})
    assert [fleet.engine_tokens(each) for each in counts] == [0, 50, 60, 65, 75, 79]


def test_what_the_day_needed_is_not_taken_away_by_night() -> None:
    fleet = model.ModelFleet()
    for needed in ({"head": 3, "tree": 0}, {"head": 0, "tree": 1}):
        fleet._past.append(needed)
    assert [fleet._most(method) for method in ("head", "tree", "plain")] == [3, 1, 0]


@pytest.mark.slow
async def test_of_targets_that_no_number_keeps_it_says_so() -> None:
    policy = {"name": "learned", "seed": 0, "slo": {"tpot_ms": 0.01}}
    async with start_gateway({"a": "baseline", "b": "ngram"}, policy, behaviour=paced) as running:
        for _ in range(100):
            await chats(running)
            if "no number of its replicas keeps 0.01 ms" in (answer := await asked(running)).text:
                break
        assert answer.status_code == 404
        assert not await fleet_findings(running)
        page = (await running.client.get("/metrics")).text
        assert not series(page, "gateway_replicas_needed")
        assert min(series(page, "gateway_pool_saturation").values()) > 1.0
