"""Which replicas are well: probes and reports, against a server that can be told to be unwell."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from backends.backend import Backend, State
from backends.pool import HealthRules, Pool
from backends.speculation import Method
from tests.support.upstream import Upstream

RULES = HealthRules(interval_s=0.05, timeout_s=0.3, eject_s=0.2, eject_max_s=0.5, stall_s=0.4)


@contextlib.asynccontextmanager
async def watched(
    prepare: Callable[[Upstream], None] = lambda _: None,
) -> AsyncIterator[tuple[Pool, Backend, Upstream]]:
    async with Upstream("a", "m") as upstream:
        prepare(upstream)
        backend = Backend("a", "m", Method.BASELINE, upstream.url)
        pool = Pool([backend], RULES)
        await pool.start()
        try:
            yield pool, backend, upstream
        finally:
            await pool.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_who_waits_for_the_first_look_knows_who_is_up() -> None:
    async with watched() as (pool, backend, _):
        assert backend.state is State.STARTING
        await pool.looked_at(5.0)
        assert backend.state is State.UP


async def test_nobody_waits_long_for_one_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and no more than that
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pool = Pool([Backend("a", "m", Method.BASELINE, url)], replace(RULES, timeout_s=60.0))
        await pool.start()
        try:
            async with asyncio.timeout(5.0):
                await pool.looked_at(0.05)
            assert not pool.up("m")
        finally:
            await pool.stop()


async def test_it_comes_up_and_says_how_loaded_it_is() -> None:
    def busy(upstream: Upstream) -> None:
        upstream.metrics = (
            b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\n"
            b"vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_draft_tokens_total 30\n"
            b"vllm:spec_decode_num_accepted_tokens_total 15\n"
        )

    async with watched(busy) as (pool, backend, _):
        backend.in_flight = 4
        await until(lambda: backend.state is State.UP)
        assert pool.up("m") == [backend]
        assert (backend.load.running, backend.load.waiting, backend.load.kv_usage) == (3, 2, 0.25)
        assert backend.load.others == 1  # four of the five are ours
        engine = pool.engine(backend)
        assert engine is not None
        assert engine.acceptance_rate == 0.5
        card = pool.model_card("m")
        assert card is not None
        assert card["max_model_len"] == 2048


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda upstream: setattr(upstream, "health_status", 503), "/health answered 503"),
        (lambda upstream: setattr(upstream, "health_hangs", True), "does not answer"),
        (
            lambda upstream: setattr(upstream, "model", "other"),
            "serves other, not m: start it with --served-model-name m",
        ),
        (
            lambda upstream: setattr(upstream, "models", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<br>"),
            "/v1/models answered garbage",
        ),
        (
            lambda upstream: setattr(upstream, "models", b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"),
            "set the backend's api_key",
        ),
    ],
)
async def test_what_is_unwell_is_not_let_in_and_says_why(prepare: Callable[[Upstream], None], says: str) -> None:
    async with watched(prepare) as (pool, backend, _):
        await until(lambda: backend.state is State.DOWN)
        assert says in backend.state_reason
        assert pool.up("m") == []


async def test_a_page_that_cannot_be_read_does_not_take_it_out() -> None:
    async with watched(lambda upstream: setattr(upstream, "metrics_status", 404)) as (pool, backend, _):
        await until(lambda: backend.state is State.UP)
        assert pool.engine(backend) is None


async def test_one_slow_probe_is_forgiven_two_are_not() -> None:
    async with watched() as (_, backend, upstream):
        await until(lambda: backend.state is State.UP)
        upstream.health_hangs = True
        await asyncio.sleep(0.2)
        assert backend.state is State.UP
        await until(lambda: backend.state is State.DOWN)
        upstream.health_hangs = False
        await until(lambda: backend.state is State.UP)


async def test_it_dies_and_comes_back() -> None:
    async with watched() as (pool, backend, upstream):
        told: list[Backend] = []
        pool.on_down = told.append
        await until(lambda: backend.state is State.UP)
        await upstream.die()
        await until(lambda: backend.state is State.DOWN)
        assert told == [backend]
        await upstream.come_back()
        await until(lambda: backend.state is State.UP)


async def test_a_refused_connection_counts_before_any_probe() -> None:
    async with watched() as (pool, backend, _):
        await until(lambda: backend.state is State.UP)
        pool.report_failure(backend, "connect", "refused")
        assert backend.state is State.DOWN
        await until(lambda: backend.state is State.UP)  # a probe finds it well after all


async def test_broken_answers_eject_for_longer_each_time() -> None:
    async with watched() as (pool, backend, _):
        loop = asyncio.get_running_loop()
        out_s = []
        for _ in range(3):
            await until(lambda: backend.state is State.UP)
            pool.report_failure(backend, "garbage", "nonsense")
            assert backend.state is State.EJECTED
            before_s = loop.time()
            await until(lambda: backend.state is State.UP)
            out_s.append(loop.time() - before_s)
        assert 0.2 <= out_s[0] < out_s[1] < out_s[2]
        assert out_s[1] >= 0.4
        pool.report_success(backend)
        pool.report_failure(backend, "garbage", "nonsense")
        before_s = loop.time()
        await until(lambda: backend.state is State.UP)
        assert loop.time() - before_s < 0.39  # a good answer in between forgives


async def test_three_broken_answers_in_a_row_eject() -> None:
    async with watched() as (pool, backend, _):
        await until(lambda: backend.state is State.UP)
        for _ in range(2):
            pool.report_failure(backend, "broken", "cut")
        pool.report_success(backend)
        for _ in range(2):
            pool.report_failure(backend, "broken", "cut")
        assert backend.state is State.UP
        pool.report_failure(backend, "broken", "cut")
        assert backend.state is State.EJECTED


async def test_an_engine_that_has_requests_but_makes_no_token_is_down() -> None:
    def stuck(upstream: Upstream) -> None:
        upstream.metrics = b"vllm:num_requests_running 1\nvllm:generation_tokens_total 7\nvllm:prompt_tokens_total 7\n"

    async with watched(stuck) as (_, backend, upstream):
        await until(lambda: backend.state is State.UP)
        await until(lambda: backend.state is State.DOWN)
        assert "no token" in backend.state_reason
        upstream.metrics = upstream.metrics.replace(b"generation_tokens_total 7", b"generation_tokens_total 8")
        await until(lambda: backend.state is State.UP)


async def test_an_idle_engine_makes_no_token_and_is_well() -> None:
    async with watched() as (_, backend, _upstream):
        await until(lambda: backend.state is State.UP)
        await asyncio.sleep(0.6)
        assert backend.state is State.UP


async def test_drained_it_stays_out_whatever_happens() -> None:
    async with watched() as (pool, backend, upstream):
        await until(lambda: backend.state is State.UP)
        pool.set_drained(backend, drained=True)
        await asyncio.sleep(0.2)
        pool.report_failure(backend, "connect", "refused")
        assert backend.state is State.DRAINING
        await upstream.die()
        await asyncio.sleep(0.2)
        assert backend.state is State.DRAINING
        pool.set_drained(backend, drained=False)
        await asyncio.sleep(0.1)
        assert backend.state is not State.UP
        await upstream.come_back()
        await until(lambda: backend.state is State.UP)
