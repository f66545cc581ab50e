"""The state of replicas after probes and reports, against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import uvloop

from backends.backend import Backend, EngineChange
from backends.draft_schedule import DraftSchedule, Speculation
from backends.engine_metrics import EngineMetrics
from backends.health import Ejected, Health, HealthRules, Probed, State, Strike, Unreachable
from backends.pool import Listener, Pool
from backends.probe import Probe, ProbeResult
from backends.speculation import Method
from tests.support.upstream import Upstream
from tests.support.waiting import eventually, stays

RULES = HealthRules(interval_s=0.05, timeout_s=0.3, eject_s=0.2, eject_max_s=0.5, slow_start_s=0.0, stall_s=0.4)


class Heard(Listener):
    """What a pool has told."""

    def __init__(self) -> None:
        self.down: list[Backend] = []
        self.ready: list[str] = []
        self.ejections: list[tuple[str, float, str]] = []
        self.changes: list[tuple[str, EngineChange]] = []

    def went_down(self, backend: Backend) -> None:
        self.down.append(backend)

    def became_ready(self, backend: Backend) -> None:
        self.ready.append(backend.name)

    def was_ejected(self, backend: Backend, duration_s: float, reason: str) -> None:
        self.ejections.append((backend.name, duration_s, reason))

    def engine_changed(self, backend: Backend, change: EngineChange) -> None:
        self.changes.append((backend.name, change))


@contextlib.asynccontextmanager
async def started(pool: Pool) -> AsyncIterator[Pool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@contextlib.asynccontextmanager
async def running_pool(
    prepare: Callable[[Upstream], None] = lambda _: None, others: int = 0, rules: HealthRules = RULES
) -> AsyncIterator[tuple[Pool, Backend, Upstream]]:
    """Run a pool with a replica `a`, and others of the same server; return `a` and the server."""
    async with Upstream("a", "m") as upstream:
        prepare(upstream)
        names = ["a", *(f"other{number}" for number in range(others))]
        backend, *rest = [Backend(name, "m", Method.BASELINE, upstream.url) for name in names]
        async with started(Pool([backend, *rest], rules)) as pool:
            yield pool, backend, upstream


@pytest.mark.parametrize("launched", [False, True])
async def test_a_replica_that_refuses_from_the_start_is_logged_once_unless_the_gateway_starts_it(
    launched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(Probe):
        probes = 0
        problem = "refuses connections (1)"

        async def run(self, *, admit: bool, prove: bool = False) -> ProbeResult:
            Refused.probes += 1
            return ProbeResult(Refused.problem, refused=True)

    def lines() -> list[str]:
        return [line.message for line in caplog.records if line.levelname == "WARNING"]

    backend = Backend("a", "m", Method.BASELINE, "http://127.0.0.1:1", launched=launched)
    async with started(Pool([backend], RULES, Refused)):
        await eventually(lambda: Refused.probes >= 3)
        expected = [] if launched else ["m/a cannot be reached yet: refuses connections (1)"]
        assert lines() == expected
        Refused.problem = "refuses connections (2)"
        seen = Refused.probes
        await eventually(lambda: Refused.probes >= seen + 3)
        assert lines() == expected + ([] if launched else ["m/a cannot be reached yet: refuses connections (2)"])
        assert backend.health.state is State.STARTING


async def test_a_model_that_all_engines_call_otherwise_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def serve_other(upstream: Upstream) -> None:
        upstream.model = "other"

    async with running_pool(serve_other, others=2) as (pool, _, _):
        await eventually(lambda: all("serves other, not m" in each.health.reason for each in pool))
        said = (
            "m: none of 3 engines serves m, all serve other: call the model other in the pool file, or start them with "
            "--served-model-name m"
        )
        await eventually(lambda: said in caplog.messages)
        await stays(lambda: caplog.messages.count(said) == 1, 0.2)


async def test_an_engine_that_comes_back_with_another_model_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It was down while it restarted: that it still is has another reason now."""
    async with running_pool() as (_, backend, upstream):
        await eventually(lambda: backend.health.state is State.UP)
        await upstream.die()
        await eventually(lambda: backend.health.state is State.DOWN)
        upstream.model = "other"
        await upstream.come_back()
        said = "m/a is still down: serves other, not m: "
        await eventually(lambda: any(line.startswith(said) for line in caplog.messages))
        await stays(lambda: sum(line.startswith(said) for line in caplog.messages) == 1, 0.2)
        upstream.model = "m"
        await eventually(lambda: backend.health.state is State.UP)
        assert sum("is still down" in line for line in caplog.messages) == 1


async def test_waiting_for_the_first_probes_ends_at_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections but never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        rules = replace(RULES, timeout_s=60.0)
        async with started(Pool([Backend("a", "m", Method.BASELINE, url)], rules)) as pool:
            async with asyncio.timeout(5.0):
                await pool.wait_until_probed(0.05)
            assert not pool.up("m")


async def test_a_healthy_replica_comes_up_with_its_load_and_metrics() -> None:
    def busy(upstream: Upstream) -> None:
        upstream.metrics = (
            b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\n"
            b"vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_draft_tokens_total 30\n"
            b"vllm:spec_decode_num_accepted_tokens_total 15\n"
            b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9\n'
            b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 6\n'
        )

    async with running_pool(busy) as (pool, backend, _):
        backend.in_flight = 4
        await eventually(lambda: backend.health.state is State.UP)
        assert pool.up("m") == [backend]
        assert (backend.load.running, backend.load.waiting, backend.load.kv_usage) == (3, 2, 0.25)
        assert backend.load.others == 1  # four of the five requests are from this gateway
        assert (backend.load.drafts, backend.load.accepted_tokens) == (10, 15)
        card = backend.engine.said.card
        assert card is not None
        assert card["max_model_len"] == backend.engine.said.context_tokens == 2048


@pytest.mark.slow
async def test_what_happens_to_a_replica_is_told_once_and_probes_go_on_if_the_listener_raises() -> None:
    class Broken(Heard):
        def went_down(self, backend: Backend) -> None:
            super().went_down(backend)
            raise ZeroDivisionError

        def became_ready(self, backend: Backend) -> None:
            super().became_ready(backend)
            raise ZeroDivisionError

        def engine_changed(self, backend: Backend, change: EngineChange) -> None:
            super().engine_changed(backend, change)
            raise ZeroDivisionError

    async with running_pool() as (pool, backend, upstream):
        pool.listen(heard := Broken())
        await eventually(lambda: backend.engine.metrics is not None)
        page = upstream.metrics
        for started in (b"1.0", b"7.0"):
            upstream.metrics = page + b"process_start_time_seconds " + started + b"\n"
            await eventually(lambda at_s=float(started): _engine(pool, backend).started_s == at_s)
        await stays(lambda: heard.changes == [("a", EngineChange.RESTART)], 0.2)
        ready = len(heard.ready)
        await upstream.die()
        await eventually(lambda: backend.health.state is State.DOWN)
        assert heard.down == [backend]
        await upstream.come_back()
        await eventually(lambda: backend.health.state is State.UP)
        assert len(heard.ready) == ready + 1


def _engine(pool: Pool, backend: Backend) -> EngineMetrics:
    engine = backend.engine.metrics
    assert engine is not None
    return engine


@pytest.mark.slow
def test_a_replica_is_not_blamed_for_what_this_process_was_busy_with() -> None:
    async def main() -> None:
        async with running_pool() as (_, backend, upstream):
            await eventually(lambda: backend.health.state is State.UP)
            for _ in range(2 * RULES.strikes):
                end_s = time.monotonic() + RULES.timeout_s
                while time.monotonic() < end_s:
                    pass
                await asyncio.sleep(0)
                assert backend.health.state is State.UP
            upstream.health_hangs = True
            await eventually(lambda: backend.health.state is State.DOWN)

    uvloop.run(main())  # as the gateway: after a long turn, time-outs come before what has arrived


@pytest.mark.slow
async def test_a_replica_that_hangs_is_found_by_a_process_that_is_always_late() -> None:
    async with running_pool() as (_, backend, upstream):
        await eventually(lambda: backend.health.state is State.UP)
        upstream.health_hangs = True

        def is_down() -> bool:
            end_s = time.monotonic() + RULES.timeout_s / 2
            while time.monotonic() < end_s:
                pass
            return backend.health.state is State.DOWN

        await eventually(is_down)


@pytest.mark.slow
async def test_a_failure_wakes_the_probe() -> None:
    async with running_pool(rules=replace(RULES, interval_s=60.0)) as (pool, backend, upstream):
        await eventually(lambda: backend.health.state is State.UP)
        upstream.health_status = 503
        await stays(lambda: backend.health.state is State.UP, 0.2)
        pool.report_failure(backend)
        await eventually(lambda: backend.health.failed_probes > 0)


def unprobed(*names: str) -> tuple[Pool, list[Backend]]:
    """Return a pool that is not probed, with backends that are up."""
    backends = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", health=Health(State.UP)) for name in names]
    return Pool(backends, RULES), backends


def strike(pool: Pool, backend: Backend, *requests: int) -> None:
    for request in requests:
        pool.report(backend, Strike(request, "broke its answer"))


def test_ejections_on_own_evidence_are_reported_and_spare_the_last_replica() -> None:
    pool, (backend, other) = unprobed("a", "b")
    pool.listen(heard := Heard())
    strike(pool, backend, 1, 2, 3, 4)
    strike(pool, other, 1, 2, 3, 4)
    assert [backend.health.state, other.health.state] == [State.EJECTED, State.UP]
    assert heard.ejections == [("a", 0.2, "broke its answer")]
    assert pool.report(backend, Unreachable("refused"))
    assert pool.report(backend, Probed())
    pool.report(backend, Ejected(5.0, "failed at another gateway"))
    assert backend.health.reason == "failed at another gateway; ejected for 5 s"
    assert len(heard.ejections) == 1, "that is known there"


def test_time_outs_count_if_no_metrics_show_the_engine_at_work() -> None:
    for engine, state in (
        (None, State.EJECTED),
        (EngineMetrics(), State.EJECTED),
        (EngineMetrics(waiting=1), State.UP),
    ):
        pool, (backend, _) = unprobed("a", "b")
        backend.engine.metrics = engine
        for request in range(3):
            pool.report_timeout(backend, request, "sent nothing", 0.0)
        assert backend.health.state is state


def test_a_request_that_was_lost_with_an_earlier_engine_is_no_evidence_against_the_next() -> None:
    pool, (backend, _) = unprobed("a", "b")
    pool.report(backend, Ejected(1e-9, "failed"))
    pool.report(backend, Probed())
    pool.report_timeout(backend, 1, "sent nothing", 60.0)
    assert backend.health.state is State.RECOVERING
    pool.report_timeout(backend, 1, "sent nothing", 0.0)
    assert backend.health.state is State.EJECTED


def test_a_replica_that_recovers_is_up_as_soon_as_no_other_is() -> None:
    pool, (backend, other) = unprobed("a", "b")
    pool.listen(heard := Heard())
    pool.report(backend, Ejected(1e-9, "failed"))
    pool.report(backend, Probed())
    assert pool.recovery.is_on_trial(backend)
    assert pool.up("m") == [other]
    pool.report(other, Unreachable("refused"))
    assert (backend.health.state, pool.recovery.replicas) == (State.UP, {})
    assert heard.ready == ["a", "a"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_probe_that_fails_in_no_known_way_is_not_the_last(hangs: bool) -> None:
    class Odd(Probe):
        runs = 0

        async def run(self, *, admit: bool, prove: bool = False) -> ProbeResult:
            self.runs += 1
            if self.runs > 1:
                return ProbeResult()
            if hangs:
                await asyncio.Event().wait()
            raise OSError("not one of httpx")

    backend = Backend("a", "m", Method.BASELINE, "http://127.0.0.1:1")
    async with started(Pool([backend], HealthRules(interval_s=0.01, timeout_s=0.05), Odd)):
        await eventually(lambda: backend.health.state is State.UP)


async def test_a_replica_whose_first_probe_fails_in_no_known_way_can_join() -> None:
    class Odd(Probe):
        async def run(self, *, admit: bool, prove: bool = False) -> ProbeResult:
            raise OSError("not one of httpx")

    pool = Pool([], RULES, Odd)
    (joining,) = await pool.probe([Backend("a", "m", Method.BASELINE, "http://127.0.0.1:1")], RULES, 5.0)
    assert joining.result is not None
    assert "OSError" in (joining.result.problem or "")
    await joining.watch.probe.close()


async def test_an_engine_that_the_gateway_ends_is_not_up_and_contradicts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another one is started at its address; what that one shows counts."""
    said = "m/a: the pool file says baseline"
    page = b"vllm:num_requests_running 0\nvllm:spec_decode_num_drafts_total 0\nprocess_start_time_seconds %d\n"
    async with running_pool(lambda upstream: setattr(upstream, "metrics", page % 7)) as (pool, backend, upstream):
        await eventually(lambda: backend.health.state is State.UP)
        later = Backend("a", "m", Method.BASELINE, upstream.url, launched=True)
        backend.declared = Speculation(Method.SUFFIX, DraftSchedule(24))
        caplog.clear()
        pool.update([later], await pool.probe([later], RULES, 5.0), RULES)
        assert later.health.state is State.DOWN
        assert later.health.reason == "another engine is started in its place"
        assert not [line for line in caplog.messages if line.startswith(said)]
        upstream.metrics = page % 8
        await eventually(lambda: later.health.state is State.UP)
        assert [line for line in caplog.messages if line.startswith(said)]
