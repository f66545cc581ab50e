"""What a running gateway says of the replicas that it needs."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.fleet import room
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, Start
from tests.gateway.dashboard.conftest import snapshot
from tests.support.upstream import Wire, delta
from tests.support.waiting import eventually_async

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


async def paced(wire: Wire) -> None:
    """Stream an answer of a token every three milliseconds."""
    await wire.begin_stream()
    for _ in range(20):
        await wire.chunk(delta("word "))
        await asyncio.sleep(0.003)
    usage = {"prompt_tokens": 50, "completion_tokens": 20, "total_tokens": 70}
    await wire.chunk(b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n")
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end_stream()


def series(page: str, name: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page.splitlines() if line.startswith(f"{name}{{"))
    return {labels: float(value) for labels, _, value in lines}


async def until_known(running: Running) -> dict[str, object]:
    for _ in range(100):
        await asyncio.gather(*(running.chat(f"hello {number}", temperature=0.0, stream=True) for number in range(10)))
        answer = await running.client.get("/admin/fleet", params={"model": MODEL}, headers=ADMIN)
        if answer.status_code == 200 and answer.json()["saturation"] is not None:
            return answer.json()  # type: ignore[no-any-return]
        assert answer.status_code in {200, 404}
    pytest.fail("it was never known")


@pytest.mark.parametrize(("tpot_ms", "is_enough"), [(1000.0, True), (0.01, False)])
async def test_it_says_how_many_of_which_method(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch, tpot_ms: float, is_enough: bool
) -> None:
    monkeypatch.setattr(room, "_MINUTE_S", 0.2)
    policy = {"name": "learned", "seed": 0, "slo": {"tpot_ms": tpot_ms}}
    async with gateway_of({"a": "baseline", "b": "ngram"}, policy, behaviour=paced) as running:
        url = "/admin/fleet"
        assert (await running.client.get(url, params={"model": MODEL})).status_code == 401
        assert (await running.client.get(url, params={"model": "other"}, headers=ADMIN)).status_code == 404
        said = await until_known(running)
        (found,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        judged, missed = (sum(getattr(each, of) for each in found.fleets[MODEL].minutes) for of in ("judged", "missed"))
        assert judged > 0
        assert missed == (0 if is_enough else judged)
        page = (await running.client.get("/metrics")).text
        needed = series(page, "gateway_replicas_needed")
        assert len(needed) == 2
        assert all(f'model="{MODEL}"' in labels for labels in needed)
        (saturation,) = series(page, "gateway_pool_saturation").values()
        assert said["needed"] == sum(said["methods"].values())  # type: ignore[attr-defined]
        assert (said["needed"] == 1) == is_enough
        assert (saturation <= 1.0) == is_enough
        advised = (await running.client.get("/admin/advice", headers=ADMIN)).json()["models"][MODEL]
        titles = [each["title"] for each in advised["findings"] if each["rule"] == "fleet"]
        assert len(titles) == 1
        assert titles[0].startswith("the traffic needs 1 replica: 1 ") == is_enough

        async def is_shown() -> bool:
            shown = (await snapshot(running))["models"][0]["load"]
            return shown is not None and (shown <= 1.0) == is_enough

        await eventually_async(is_shown)
        one = await running.client.get(url, params={"model": MODEL, "method": "ngram"}, headers=ADMIN)
        assert one.json()["needed"] == one.json()["methods"]["ngram"]


async def test_a_policy_that_does_not_learn_says_nothing(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MINUTE_S", 0.05)
    async with gateway_of() as running:
        (found,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        await running.until(lambda: MODEL in found.fleets and len(found.fleets[MODEL].minutes) > 5)
        answer = await running.client.get("/admin/fleet", params={"model": MODEL}, headers=ADMIN)
        assert answer.status_code == 404
