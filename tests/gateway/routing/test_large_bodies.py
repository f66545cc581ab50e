"""Large bodies: what they hold is counted before they are parsed, and they are parsed one after another, in turns."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from gateway.dialects.errors import GatewayError
from gateway.routing import large_bodies, router
from gateway.routing.large_bodies import Turns, check_cost
from tests.gateway.conftest import MODEL, Start
from tests.gateway.relay.test_frontends import Raw, post
from tests.support.upstream import answering
from tests.support.waiting import eventually

# What a body counts to

_TEXTS = ("", "a, [b]: {c}", '"', "\\", '\\"', "\\\\", 'x\\"\\\\', "é,[", "\n")


def _random(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5 if depth else 3)
    if kind == 0:
        return rng.randrange(10**6)
    if kind < 3:
        return rng.choice(_TEXTS) + rng.choice(_TEXTS)
    if kind == 3:
        return [_random(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(_TEXTS) + str(number): _random(rng, depth - 1) for number in range(rng.randrange(4))}


def _counted(value: Any) -> int:
    if isinstance(value, str):
        return 2
    if isinstance(value, list):
        return 16 + max(0, len(value) - 1) + sum(map(_counted, value))
    if isinstance(value, dict):
        return 16 + max(0, len(value) - 1) + sum(2 + 2 + _counted(inner) for inner in value.values())
    return 0


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1000])
def test_it_counts_what_is_outside_strings_wherever_a_piece_ends(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "_PIECE_BYTES", piece_bytes)
    rng = random.Random(piece_bytes)
    for _ in range(300):
        document = {"a": _random(rng, 4)}
        body = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()
        count = _counted(document)
        list(check_cost(body, count))
        with pytest.raises(GatewayError, match="max_body_values") as refused:
            list(check_cost(body, count - 1))
        assert refused.value.status == 413


def test_it_stops_at_the_piece_that_is_too_much() -> None:
    steps = check_cost(b'{"a":[' + b"{}," * 10**6, most=100_000)
    with pytest.raises(GatewayError):
        next(steps)


@pytest.mark.slow
async def test_the_bound_is_a_setting_and_bodies_that_are_no_json_have_none(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, server={"max_body_values": 50_000}) as running:
        few, many = ({"model": MODEL, "prompt": list(range(count))} for count in (49_000, 51_000))
        assert (await running.client.post("/v1/completions", json=few)).status_code == 200
        refused = await running.client.post("/v1/completions", json=many)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_values")
        assert running.gateway.relay.limits.in_flight == 0
        running.upstreams["a"].behaviour = answering({"text": "hi"})
        audio = bytes(range(256)) * 2**13
        assert (await running.client.post("/v1/audio/transcriptions", content=audio)).status_code == 200
        assert running.upstreams["a"].seen[-1].body == audio


@pytest.mark.skipif(not router.__file__.endswith(".py"), reason="compiled, methods cannot be replaced")
async def test_a_defect_while_a_large_body_is_checked_is_answered(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        monkeypatch.setattr(running.gateway.relay.router, "check", lambda _: map(int, ["defect"]))
        answer = await running.chat("a" * 10**6)
        assert (answer.status_code, running.gateway.relay.limits.in_flight) == (500, 0)


# Turns


async def test_others_have_their_turn_between_steps_and_as_much_time_as_a_long_one_took() -> None:
    turns, log = Turns(), list[tuple[str, float]]()

    def steps(name: str, count: int, each_s: float) -> Iterator[None]:
        for _ in range(count):
            end_s = time.perf_counter() + each_s
            while time.perf_counter() < end_s:
                pass
            log.append((name, time.perf_counter()))
            yield

    for name in ("a", "a", "b"):
        turns.add(name, steps(name, 2, 0.02))
    assert log == [], "not in the call that adds"
    await eventually(lambda: len(log) == 6)
    assert [name for name, _ in log] == ["a", "b", "a", "b", "a", "a"]
    gaps_s = [later - earlier for (_, earlier), (_, later) in pairwise(log)]
    assert min(gaps_s) >= 2 * 0.02


async def test_short_steps_take_a_turn_each_without_a_pause() -> None:
    turns, taken = Turns(), 0

    def steps() -> Iterator[None]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield

    for _ in range(2):  # it begins again after it had nothing to do
        turns.add("a", steps())
        seen, until = 0, taken + 100
        while taken < until:
            seen += 1
            await asyncio.sleep(0)
        assert seen >= 100
        await eventually(lambda: not turns._waiting)


async def test_a_step_that_raises_takes_the_turn_of_nobody_else() -> None:
    turns, taken = Turns(), list[str]()

    def steps(name: str) -> Iterator[None]:
        taken.append(name)
        if name == "a":
            raise RuntimeError
        yield

    for name in ("a", "a", "b"):
        turns.add(name, steps(name))
    await eventually(lambda: taken == ["a", "b", "a"])
    turns.add("c", steps("c"))
    await eventually(lambda: taken[3:] == ["c"])


async def test_a_client_that_leaves_before_its_turn_frees_its_place(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 10**6}).encode()
    monkeypatch.setattr(Turns, "_continue", lambda self: None)  # its turn does not come
    async with gateway_of({"a": "baseline"}) as running:
        limits, turns = running.gateway.relay.limits, running.gateway.relay.turns
        async with Raw.to(running) as raw:
            raw.writer.write(post(body))
            await eventually(lambda: limits.in_flight == 1)
        await eventually(lambda: limits.in_flight == 0)
        while turns._waiting:
            turns._step()
        assert running.upstreams["a"].seen == []
