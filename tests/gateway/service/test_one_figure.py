"""One run, read at all places: the same number for the same thing, whoever says it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from backends.health import Ejected, State
from gateway.rooms.fleet import model, room
from tests.gateway.conftest import ADMIN, MODEL, Running, start_gateway
from tests.support.upstream import END, Wire, delta, usage
from tests.support.waiting import eventually_async

METHODS = {"plain": "baseline", "lookup": "ngram", "head": "eagle3"}
TOKENS_PER_STEP = {"plain": 1.0, "lookup": 1.25, "head": 2.0}
DRAFTS, PER_DRAFT = {"plain": 0.0, "lookup": 0.125, "head": 1.0}, {"lookup": 5, "head": 3}
"""Of each step: the share that drafts, and the tokens that it then drafts."""
OTHER_MEANINGS = {
    "belief",  # expected and observed by kind of request, as the page says
    "tokens_per_step.shown",  # the comparison of answers and engine, whose two sides it names
    "tokens_per_step.counted_at_least",
    "tokens_per_step.counted_at_most",
    "tokens_per_step.share_of_others",
    "tokens_per_step.differs",
}


def page(name: str, steps: int) -> bytes:
    """Return what an engine counts after so many steps: its `/metrics`."""
    tokens = steps * TOKENS_PER_STEP[name]
    lines = ["num_requests_running 0", "num_requests_waiting 0", f"generation_tokens_total {tokens}"]
    lines += ["time_to_first_token_seconds_count 0", f"inter_token_latency_seconds_count {steps}"]
    if name != "plain":
        drafts = steps * DRAFTS[name]
        lines += [f"spec_decode_num_drafts_total {drafts}", f"spec_decode_num_accepted_tokens_total {tokens - steps}"]
        lines += [f"spec_decode_num_draft_tokens_total {drafts * PER_DRAFT[name]}"]
        lines += [
            f'spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}} 0' for at in range(PER_DRAFT[name])
        ]
    return "".join(f"vllm:{line}\n" for line in lines).encode()


async def paced(wire: Wire) -> None:
    """Stream a token every three milliseconds, and count as vLLM does."""
    await wire.stream(*[delta("word ")] * 10, usage(50, 10), END, pause_s=0.003)
    wire.upstream.metrics = page(wire.upstream.name, 8000 * len(wire.upstream.seen))


def figures(document: Any, wanted: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value below a key with a name like that, with the keys that lead there."""
    if isinstance(document, dict):
        for key, value in document.items():
            inner = f"{path}.{key}"
            if wanted in inner and not isinstance(value, dict | list):
                yield inner, value
            else:
                yield from figures(value, wanted, inner)
    elif isinstance(document, list):
        for each in document:
            name = each.get("name") or each.get("backend") if isinstance(each, dict) else None
            yield from figures(each, wanted, f"{path}.{name}" if name else path)


async def documents(running: Running) -> dict[str, Any]:
    """Return what each path of `/admin` answers that says something of the pool."""
    paths = (await running.client.get("/admin/openapi.json", headers=ADMIN)).json()["paths"]
    asked = [path for path, operations in paths.items() if "get" in operations and "history" not in path]
    found = {}
    for path in asked:
        answer = await running.client.get(path, params={"model": MODEL}, headers=ADMIN)
        if answer.status_code == 200 and answer.headers.get("content-type") == "application/json":
            found[path] = answer.json()
    return found


def series(text: str, name: str) -> dict[str, float]:
    """Return the values of a series by backend, method or what else its last label is."""
    rows = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    label = "backend" if "_backend_" in name else "method" if name.endswith("needed") else "replicas"
    return {dict(re.findall(r'(\w+)="([^"]*)"', labels)).get(label, ""): float(value) for labels, value in rows}


@pytest.mark.slow
async def test_all_places_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MINUTE_S", 0.6)
    monkeypatch.setattr(model, "HOUR_MINUTES", 6)
    policy = {"name": "learned", "seed": 0, "slo": {"tpot_ms": 1000.0}}
    async with start_gateway(METHODS, policy, behaviour=paced) as running:
        for name, upstream in running.upstreams.items():
            upstream.metrics = page(name, 0)

        async def chat(number: int) -> None:
            await running.chat(f"hello {number}", temperature=0.0, stream=True)

        is_wanted = True

        async def traffic() -> None:
            while is_wanted:  # an hour has 3.6 s here: its traffic may not pause
                await asyncio.gather(*map(chat, range(12)))

        async def is_known() -> bool:
            texts = (await running.client.get("/metrics")).text
            known = series(texts, "gateway_backend_tokens_per_step")
            fleet = await running.client.get("/admin/fleet", params={"model": MODEL}, headers=ADMIN)
            return len(known) == 3 and not any(value != value for value in known.values()) and fleet.is_success

        chats = asyncio.create_task(traffic())
        await eventually_async(is_known)
        is_wanted = False
        await chats
        running.gateway.pool.report(running.backend("plain"), Ejected(0.1, "for a moment"))
        await running.until(lambda: running.backend("plain").health.state is State.RECOVERING)
        (fleets,) = (each for each in running.gateway.rooms if isinstance(each, room.FleetRoom))
        fleets._next_s = float("inf")  # what it has said stands
        await running.until(lambda: fleets.running is not None and fleets.running.done())
        found = await documents(running)
        text = (await running.client.get("/metrics")).text
        assert {"/admin/pool", "/admin/fleet", "/admin/advice", "/admin/dashboard/snapshot"} <= set(found)

        # Tokens per step
        shown = series(text, "gateway_backend_tokens_per_step")
        assert shown == pytest.approx(TOKENS_PER_STEP, rel=0.01)
        seen = set()
        for path, document in found.items():
            for where, value in figures(document, "tokens_per_step"):
                if not any(other in where for other in OTHER_MEANINGS) and value is not None:
                    (name,) = (each for each in METHODS if f".{each}." in where)
                    assert value == pytest.approx(TOKENS_PER_STEP[name], rel=0.01), f"{path}{where}"
                    seen.add(path)
        assert seen >= {"/admin/pool", "/admin/dashboard/snapshot"}
        rates = {name: (TOKENS_PER_STEP[name] - 1.0) / DRAFTS[name] / PER_DRAFT[name] for name in PER_DRAFT}
        accepted = series(text, "gateway_backend_acceptance_ratio")
        assert {name: accepted[name] for name in rates} == pytest.approx(rates, rel=0.01)
        status = (await running.command("status")).stdout
        for name, per_step in TOKENS_PER_STEP.items():
            assert re.search(rf"^{name} .* {per_step:.2f} ", status, re.MULTILINE), status

        # Replicas that are up
        up = series(text, "gateway_backend_up")
        assert up == dict.fromkeys(METHODS, 1.0), "one that recovers gets requests"
        backends = found["/admin/dashboard/snapshot"]["models"][0]["backends"]
        assert {each["name"]: float(each["up"]) for each in backends} == up
        assert "3 of 3 replicas up" in status

        # Replicas that are needed
        fleet, advice = found["/admin/fleet"], found["/admin/advice"]["models"][MODEL]
        assert series(text, "gateway_replicas_needed") == fleet["methods"]
        known = {of: seconds for of, seconds in fleet["seconds"].items() if seconds is not None}
        assert series(text, "gateway_fleet_request_seconds") == pytest.approx(known)
        (saturation,) = series(text, "gateway_pool_saturation").values()
        assert saturation == fleet["saturation"]
        assert [each for each in advice["findings"] if each["rule"] == "fleet"] == fleet["advice"]
        advised = (await running.command("advise")).stdout
        for finding in advice["findings"]:
            assert finding["title"] in advised
            assert finding["worth"] in advised
        assert " : " not in advised
        assert "1. :" not in advised

        # What speculation gives
        said = advice["speculation"]
        assert said["missing"] in advised
