"""Engines that stand still, sleep, are paused or restart, and other engines at their address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from backends.health import State
from tests.gateway.conftest import FAST, MODEL, Running, start_gateway
from tests.support.registered_metrics import value_of
from tests.support.upstream import Upstream, Wire, answer, hang, well
from tests.support.waiting import stays

STALL_S = 0.8
TIMEOUTS = {"connect_s": 1.0, "first_byte_s": 60.0, "idle_s": 60.0}
GAUGES = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc %f\n"
SLEEPS = GAUGES % (0, 0.0) + b'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 1\n'


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Running]:
    async with start_gateway(timeouts=TIMEOUTS) as running:
        running.gateway.pool.rules = replace(running.gateway.pool.rules, stall_s=STALL_S)
        yield running


async def served_by(running: Running, count: int = 6) -> list[str]:
    """Send requests, half of them for streams; return which replica has answered each."""
    answers = await asyncio.gather(*(running.chat(f"hi {number}", stream=number % 2 == 0) for number in range(count)))
    assert {each.status_code for each in answers} == {200}
    return [each.headers["x-gateway-backend"] for each in answers]


@pytest.mark.slow
async def test_an_engine_that_stands_still_is_out_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it says of itself: its gauges are those of the time before."""
    async with started() as running:
        a = running.upstreams["a"]
        a.metrics, a.behaviour = GAUGES % (1, 0.5), hang
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


# A restart is a new engine: what is asked again, what is forgotten, and what its clients see of it


PAGE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total %d\n"
STARTED = PAGE + b"process_start_time_seconds %d\n"
SELDOM = {**FAST["health"], "interval_s": 60.0}
"""Probes that see no restart, so that requests have to."""


async def long_prompt(wire: Wire) -> None:
    usage = {"prompt_tokens": 20_000, "completion_tokens": 3, "total_tokens": 20_003}
    await wire.json(answer("a") | {"usage": usage})


async def of_another_model(wire: Wire) -> None:
    """Answer as vLLM does to a model that it does not serve."""
    message = f"The model `{wire.seen.json['model']}` does not exist."
    await wire.json({"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}, 404)


async def of_another_key(wire: Wire) -> None:
    await wire.json({"error": "Unauthorized"}, 401)


def become(upstream: Upstream, what: str) -> None:
    """Replace the engine at the address."""
    if what == "model":
        upstream.model, upstream.behaviour = "other", of_another_model
    else:
        upstream.models = b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"
        upstream.behaviour = of_another_key


@pytest.mark.slow
@pytest.mark.parametrize("pages", [(STARTED % (9, 7), STARTED % (12, 3)), (PAGE % 9, PAGE % 2), (b"", b"")])
async def test_a_longer_context_after_a_restart_is_known(pages: tuple[bytes, bytes]) -> None:
    async with start_gateway({"a": "baseline"}) as running:
        a, backend = running.upstreams["a"], running.backend("a")
        upstream = running.gateway.models[MODEL].upstreams["a"]
        a.metrics = pages[0]
        await running.until(lambda: (backend.engine.metrics is None) == (not pages[0]))
        engine, habits = backend.engine, upstream.habits
        a.metrics, a.max_model_len, a.behaviour = pages[1], 32_768, long_prompt
        await running.until(lambda: backend.engine is not engine)
        await running.chat()
        assert backend.engine.said.context_tokens == 32_768
        assert upstream.habits is not habits
        assert value_of(running.gateway.metrics, "gateway_prompt_tokens_total") == 20_000
        assert value_of(running.gateway.metrics, "gateway_implausible_reports_total") == 0


async def test_a_usage_that_cannot_be_has_the_engine_asked_again() -> None:
    async with start_gateway({"a": "baseline"}, health=SELDOM) as running:
        running.upstreams["a"].max_model_len, running.upstreams["a"].behaviour = 32_768, long_prompt
        await running.chat()
        await running.until(lambda: running.backend("a").engine.said.context_tokens == 32_768)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [("model", "serves other, not m: start it with"), ("key", "/v1/models answered 401: set the backend's api_key")],
)
async def test_no_client_sees_that_another_engine_is_at_an_address(what: str, reason: str) -> None:
    async with start_gateway(health=SELDOM, keys=[{"name": "team", "key": "sk"}]) as running:
        become(running.upstreams["a"], what)
        own = {"authorization": "Bearer sk"}
        answers = [await running.chat(str(number), stream=number % 2 == 0, headers=own) for number in range(6)]
        assert {(each.status_code, each.headers["x-gateway-backend"]) for each in answers} == {(200, "b")}
        await running.until(lambda: running.backend("a").health.state is State.DOWN)
        assert running.backend("a").health.reason.startswith(reason)
        assert value_of(running.gateway.metrics, "gateway_retries_total", kind=what) > 0
        become(running.upstreams["b"], what)
        last = await running.chat(headers=own)
        assert (last.status_code, last.json()["error"]["code"]) == (503, f"backend_{what}")
