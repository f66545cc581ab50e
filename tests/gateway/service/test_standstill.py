"""Engines that do nothing although they answer their probes: they stand still, sleep or are paused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from backends.health import State
from tests.gateway.conftest import Running, start_gateway
from tests.support.upstream import Wire, answer, hang, well
from tests.support.waiting import stays

STALL_S = 0.8
TIMEOUTS = {"connect_s": 1.0, "first_byte_s": 60.0, "idle_s": 60.0}
PAGE = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc %f\n"
SLEEPS = PAGE % (0, 0.0) + b'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 1\n'


@contextlib.asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[Running]:
    async with start_gateway(timeouts=TIMEOUTS, **settings) as running:
        running.gateway.pool.rules = replace(running.gateway.pool.rules, stall_s=STALL_S)
        yield running


async def served_by(running: Running, count: int = 6, text: str = "hi") -> list[str]:
    """Send requests, half of them for streams; return which replica has answered each."""
    answers = await asyncio.gather(
        *(running.chat(f"{text} {number}", stream=number % 2 == 0) for number in range(count))
    )
    assert {each.status_code for each in answers} == {200}
    return [each.headers["x-gateway-backend"] for each in answers]


@pytest.mark.slow
@pytest.mark.parametrize("page", [PAGE % (0, 0.0), PAGE % (1, 0.5)])
async def test_an_engine_that_stands_still_is_out_until_it_answers(
    page: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it says of itself; the second is one whose gauges are those of the time before."""
    async with started() as running:
        a = running.upstreams["a"]
        a.metrics, a.behaviour = page, hang
        assert set(await served_by(running)) == {"b"}
        assert any("m/a is down: stands still: " in line for line in caplog.messages)
        a.seen.clear()
        assert set(await served_by(running)) == {"b"}
        await running.until(lambda: a.seen)
        await stays(lambda: running.backend("a").health.state is State.DOWN, 0.5)
        assert {each.target for each in a.seen} == {"/v1/completions"}, "asked by its probe, and by no client"
        a.behaviour = well
        while "a" not in await served_by(running, 2):
            pass


@pytest.mark.slow
async def test_an_engine_that_computes_a_long_prompt_does_not_stand_still() -> None:
    """In parts, of which its KV cache shows each; or in one step, until which it shows nothing."""
    async with started() as running:
        a, done = running.upstreams["a"], asyncio.Event()

        async def compute(wire: Wire) -> None:
            await done.wait()
            await wire.json(answer("a"))

        a.behaviour, running.upstreams["b"].behaviour = compute, compute
        short, long = (asyncio.create_task(running.chat(text)) for text in ("hi", "word " * 20_000))
        await running.until(lambda: len(a.seen) + len(running.upstreams["b"].seen) == 2)
        name = "a" if b"word word" in a.seen[0].body else "b"
        other = running.upstreams["b" if name == "a" else "a"]

        def goes_on() -> bool:
            other.metrics = PAGE % (1, (asyncio.get_running_loop().time() % 10.0) / 10.0)
            return running.backend("a").health.state is running.backend("b").health.state is State.UP

        await stays(goes_on, 4 * STALL_S)
        done.set()
        assert [(await each).headers.get("x-gateway-retried-from") for each in (short, long)] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sleeps", "reason"), [(True, "is asleep: POST /wake_up to it"), (False, "is paused: POST /resume to it")]
)
async def test_an_engine_that_sleeps_or_is_paused_gets_no_requests(sleeps: bool, reason: str) -> None:
    async with started() as running:
        a = running.upstreams["a"]
        awake, a.is_paused = a.metrics, False
        a.max_model_len += 1  # it restarts, in development mode
        await running.until(lambda: running.backend("a").engine.said.tells_pause)
        a.is_paused = not sleeps
        a.metrics = SLEEPS if sleeps else awake
        await running.until(lambda: running.backend("a").health.state is State.DOWN)
        assert running.backend("a").health.reason == reason
        assert set(await served_by(running)) == {"b"}
        assert not a.seen
        a.metrics, a.is_paused = awake, False
        await running.until_up("a")
