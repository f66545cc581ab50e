"""The state of replicas after probes and reports, against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from backends.backend import Backend, EngineChange, State
from backends.engine_metrics import EngineMetrics
from backends.pool import HealthRules, Pool
from backends.probe import Probe, ProbeResult
from backends.recovery import Recovery
from backends.speculation import Method
from tests.support.upstream import Upstream
from tests.support.waiting import eventually, stays

RULES = HealthRules(interval_s=0.05, timeout_s=0.3, eject_s=0.2, eject_max_s=0.5, slow_start_s=0.0, stall_s=0.4)


@contextlib.asynccontextmanager
async def running_pool(
    prepare: Callable[[Upstream], None] = lambda _: None, others: int = 0, rules: HealthRules = RULES
) -> AsyncIterator[tuple[Pool, Backend, Upstream]]:
    """Run a pool with a replica `a`, and others of the same server; return `a` and the server."""
    async with Upstream("a", "m") as upstream:
        prepare(upstream)
        names = ["a", *(f"other{number}" for number in range(others))]
        backend, *rest = [Backend(name, "m", Method.BASELINE, upstream.url) for name in names]
        pool = Pool([backend, *rest], rules)
        await pool.start()
        try:
            yield pool, backend, upstream
        finally:
            await pool.stop()


async def test_after_the_first_probes_the_state_is_known() -> None:
    async with running_pool() as (pool, backend, _):
        assert backend.state is State.STARTING
        await pool.wait_until_probed(5.0)
        assert backend.state is State.UP


@pytest.mark.parametrize("launched", [False, True])
async def test_a_replica_that_refuses_from_the_start_is_logged_once_unless_the_gateway_starts_it(
    launched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(Probe):
        probes = 0
        problem = "refuses connections (1)"

        async def run(self, *, admit: bool) -> ProbeResult:
            Refused.probes += 1
            return ProbeResult(Refused.problem, refused=True)

    def lines() -> list[str]:
        return [line.message for line in caplog.records if line.levelname == "WARNING"]

    backend = Backend("a", "m", Method.BASELINE, "http://127.0.0.1:1", launched=launched)
    pool = Pool([backend], RULES, Refused)
    await pool.start()
    try:
        await eventually(lambda: Refused.probes >= 3)
        expected = [] if launched else ["m/a cannot be reached yet: refuses connections (1)"]
        assert lines() == expected
        Refused.problem = "refuses connections (2)"
        seen = Refused.probes
        await eventually(lambda: Refused.probes >= seen + 3)
        assert lines() == expected + ([] if launched else ["m/a cannot be reached yet: refuses connections (2)"])
        assert backend.state is State.STARTING
    finally:
        await pool.stop()


async def test_a_replica_that_refuses_from_the_start_is_logged_when_it_comes_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Upstream("a", "m") as upstream:
        await upstream.die()
        backend = Backend("a", "m", Method.BASELINE, upstream.url)
        pool = Pool([backend], RULES)
        with caplog.at_level("INFO", "backends.pool"):
            await pool.start()
            try:
                await eventually(lambda: "m/a cannot be reached yet: refuses connections" in caplog.text)
                await upstream.come_back()
                await eventually(lambda: backend.state is State.UP)
            finally:
                await pool.stop()
    assert [line.levelname for line in caplog.records if line.name == "backends.pool"] == ["WARNING", "INFO"]


async def test_waiting_for_the_first_probes_ends_at_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections but never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pool = Pool([Backend("a", "m", Method.BASELINE, url)], replace(RULES, timeout_s=60.0))
        await pool.start()
        try:
            async with asyncio.timeout(5.0):
                await pool.wait_until_probed(0.05)
            assert not pool.up("m")
        finally:
            await pool.stop()


async def test_a_healthy_replica_comes_up_with_its_load_and_metrics() -> None:
    def busy(upstream: Upstream) -> None:
        upstream.metrics = (
            b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\n"
            b"vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_draft_tokens_total 30\n"
            b"vllm:spec_decode_num_accepted_tokens_total 15\n"
        )

    async with running_pool(busy) as (pool, backend, _):
        backend.in_flight = 4
        await eventually(lambda: backend.state is State.UP)
        assert pool.up("m") == [backend]
        assert (backend.load.running, backend.load.waiting, backend.load.kv_usage) == (3, 2, 0.25)
        assert backend.load.others == 1  # four of the five requests are from this gateway
        assert (backend.load.drafts, backend.load.accepted_tokens) == (10, 15)
        engine = pool.engine(backend)
        assert engine is not None
        assert engine.acceptance_rate == 0.5
        card = pool.model_card("m")
        assert card is not None
        assert card["max_model_len"] == backend.context_tokens == 2048


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda upstream: setattr(upstream, "health_status", 503), "/health answered 503"),
        (lambda upstream: setattr(upstream, "health_hangs", True), "does not answer"),
        (
            lambda upstream: setattr(upstream, "model", "other"),
            "serves other, not m: start it with --served-model-name m",
        ),
        (
            lambda upstream: setattr(upstream, "models", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<br>"),
            "/v1/models did not answer with a list of models",
        ),
        (
            lambda upstream: setattr(upstream, "models", b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"),
            "set the backend's api_key",
        ),
    ],
)
async def test_an_unhealthy_replica_is_down_with_a_reason(prepare: Callable[[Upstream], None], reason: str) -> None:
    async with running_pool(prepare) as (pool, backend, _):
        await eventually(lambda: backend.state is State.DOWN)
        assert reason in backend.state_reason
        assert pool.up("m") == []


async def test_a_replica_without_a_metrics_page_is_up() -> None:
    async with running_pool(lambda upstream: setattr(upstream, "metrics_status", 404)) as (pool, backend, _):
        await eventually(lambda: backend.state is State.UP)
        assert pool.engine(backend) is None


@pytest.mark.slow
async def test_a_change_of_the_engine_is_reported_once() -> None:
    async with running_pool() as (pool, backend, upstream):
        changes: list[tuple[str, EngineChange]] = []
        pool.on_engine_change = lambda changed, change: changes.append((changed.name, change))
        await eventually(lambda: pool.engine(backend) is not None)
        page = upstream.metrics
        for started in (b"1.0", b"7.0"):
            upstream.metrics = page + b"process_start_time_seconds " + started + b"\n"
            await eventually(lambda at_s=float(started): _engine(pool, backend).started_s == at_s)
        await stays(lambda: changes == [("a", EngineChange.RESTART)], 0.2)


@pytest.mark.parametrize("hook", ["on_engine_change", "on_ready", "on_down"])
async def test_probes_go_on_after_a_hook_that_raises(hook: str) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with running_pool() as (pool, backend, upstream):
        setattr(pool, hook, broken)
        await eventually(lambda: pool.engine(backend) is not None)
        page = upstream.metrics
        for started in (b"1.0", b"7.0"):
            upstream.metrics = page + b"process_start_time_seconds " + started + b"\n"
            await eventually(lambda at_s=float(started): _engine(pool, backend).started_s == at_s)
        upstream.health_status = 500
        await eventually(lambda: backend.state is State.DOWN)
        upstream.health_status = 200
        await eventually(lambda: backend.state is State.UP)


async def test_a_replica_whose_probes_fail_in_the_pool_itself_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, broken = Pool._judge, iter([ZeroDivisionError()])

    def once(pool: Pool, *arguments: Any) -> None:
        if (error := next(broken, None)) is not None:
            raise error
        judge(pool, *arguments)

    monkeypatch.setattr(Pool, "_judge", once)
    async with running_pool() as (_, backend, _):
        await eventually(lambda: backend.state is State.UP)


def _engine(pool: Pool, backend: Backend) -> EngineMetrics:
    engine = pool.engine(backend)
    assert engine is not None
    return engine


async def test_a_replica_is_down_after_the_second_failed_probe() -> None:
    async with running_pool() as (_, backend, upstream):
        await eventually(lambda: backend.state is State.UP)
        upstream.health_hangs = True
        await stays(lambda: backend.state is State.UP, 0.2)
        await eventually(lambda: backend.state is State.DOWN)
        upstream.health_hangs = False
        await eventually(lambda: backend.state is State.UP)


def test_a_replica_is_not_blamed_for_what_this_process_was_busy_with() -> None:
    async def main() -> None:
        async with running_pool() as (_, backend, upstream):
            await eventually(lambda: backend.state is State.UP)
            for _ in range(18):
                end_s = time.monotonic() + RULES.timeout_s
                while time.monotonic() < end_s:
                    pass
                await asyncio.sleep(0)
                assert backend.state is State.UP
            await stays(lambda: backend.state is State.UP, 1.0)
            upstream.health_hangs = True
            await eventually(lambda: backend.state is State.DOWN)

    uvloop.run(main())  # as the gateway: after a long turn, time-outs come before what has arrived


async def test_a_replica_that_hangs_is_found_by_a_process_that_is_always_late() -> None:
    async with running_pool() as (_, backend, upstream):
        await eventually(lambda: backend.state is State.UP)
        upstream.health_hangs = True

        def is_down() -> bool:
            end_s = time.monotonic() + RULES.timeout_s / 2
            while time.monotonic() < end_s:
                pass
            return backend.state is State.DOWN

        await eventually(is_down)


async def test_a_replica_that_dies_is_reported_and_comes_back() -> None:
    async with running_pool() as (pool, backend, upstream):
        went_down: list[Backend] = []
        pool.on_down = went_down.append
        await eventually(lambda: backend.state is State.UP)
        await upstream.die()
        await eventually(lambda: backend.state is State.DOWN)
        assert went_down == [backend]
        await upstream.come_back()
        await eventually(lambda: backend.state is State.UP)


async def test_a_refused_connection_takes_effect_before_any_probe() -> None:
    async with running_pool() as (pool, backend, _):
        await eventually(lambda: backend.state is State.UP)
        pool.report_unreachable(backend, "refused")
        assert backend.state is State.DOWN
        await eventually(lambda: backend.state is State.UP)  # the next probe succeeds


def strike(pool: Pool, backend: Backend, *requests: int) -> None:
    for request in requests:
        pool.report_strike(backend, request, "broke its answer")


def unprobed(*names: str) -> tuple[Pool, list[Backend]]:
    """Return a pool that is not probed, with backends that are up."""
    backends = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", state=State.UP) for name in names]
    return Pool(backends, RULES), backends


def test_strikes_of_three_different_requests_in_a_row_eject() -> None:
    pool, (backend, _) = unprobed("a", "b")
    strike(pool, backend, 1, 2)
    pool.report_success(backend)
    strike(pool, backend, 1, 2, 2, 1, 1)
    assert backend.state is State.UP
    strike(pool, backend, 3)
    assert backend.state is State.EJECTED


def test_late_strikes_do_not_count_against_a_replica_that_has_returned() -> None:
    pool, (backend, _) = unprobed("a", "b")
    strike(pool, backend, 1, 2, 3)
    strike(pool, backend, 4, 5, 6)  # of requests that were in flight
    pool._judge(backend, pool._records["m", "a"], ProbeResult("/health answered 503"))
    strike(pool, backend, 7)
    pool._judge(backend, pool._records["m", "a"], ProbeResult())
    assert backend.state is State.UP
    strike(pool, backend, 8, 9)
    assert backend.state is State.UP


def test_the_last_replica_that_is_up_is_not_ejected() -> None:
    pool, backends = unprobed("a", "b", "c")
    for backend in backends:
        strike(pool, backend, 1, 2, 3, 4, 5, 6)
    assert [backend.state for backend in backends] == [State.EJECTED, State.EJECTED, State.UP]


def test_time_outs_count_if_no_metrics_show_the_engine_at_work() -> None:
    for engine, state in (
        (None, State.EJECTED),
        (EngineMetrics(), State.EJECTED),
        (EngineMetrics(waiting=1), State.UP),
    ):
        pool, (backend, _) = unprobed("a", "b")
        pool._records["m", "a"].engine = engine
        for request in range(3):
            pool.report_timeout(backend, request, "sent nothing")
        assert backend.state is state


@pytest.mark.slow
async def test_a_replica_that_is_ejected_again_stays_out_longer_in_spite_of_successes() -> None:
    async with running_pool(others=1) as (pool, backend, _):
        loop = asyncio.get_running_loop()
        ejected_s = []
        for _ in range(3):
            await eventually(lambda: backend.state is State.UP)
            pool.report_success(backend)
            strike(pool, backend, 1, 2, 3)
            assert backend.state is State.EJECTED
            before_s = loop.time()
            await eventually(lambda: backend.state is State.RECOVERING)
            pool.report_success(backend)
            ejected_s.append(loop.time() - before_s)
        assert ejected_s[0] >= 0.2
        assert ejected_s[1] >= 0.4
        assert ejected_s[2] >= 0.5


@pytest.mark.slow
async def test_a_replica_that_behaved_for_long_enough_is_ejected_for_as_short_as_the_first_time() -> None:
    async with running_pool(others=1) as (pool, backend, _):
        await eventually(lambda: backend.state is State.UP)
        for _ in range(2):
            strike(pool, backend, 1, 2, 3)
            assert "ejected for 0.2 s" in backend.state_reason
            await eventually(lambda: backend.state is State.RECOVERING)
            pool.report_success(backend)
            await stays(lambda: backend.state is State.UP, 0.6)  # longer than the longest ejection


@pytest.mark.slow
async def test_an_ejected_replica_returns_at_once_if_no_other_is_left() -> None:
    async with running_pool(others=1, rules=replace(RULES, eject_s=60.0, eject_max_s=60.0)) as (pool, backend, _):
        other = next(other for other in pool if other is not backend)
        await eventually(lambda: backend.state is other.state is State.UP)
        strike(pool, backend, 1, 2, 3)
        await stays(lambda: backend.state is State.EJECTED, 0.3)
        pool.set_drained(other, drained=True)
        await eventually(lambda: backend.state is State.UP)


async def test_a_failure_wakes_the_probe() -> None:
    async with running_pool(rules=replace(RULES, interval_s=60.0)) as (pool, backend, upstream):
        await eventually(lambda: backend.state is State.UP)
        upstream.health_status = 503
        await stays(lambda: backend.state is State.UP, 0.2)
        pool.report_failure(backend)
        await eventually(lambda: pool._records["m", "a"].failed_probes > 0)


@pytest.mark.slow
async def test_an_engine_with_requests_that_produces_no_token_is_down() -> None:
    def stuck(upstream: Upstream) -> None:
        upstream.metrics = b"vllm:num_requests_running 1\nvllm:generation_tokens_total 7\nvllm:prompt_tokens_total 7\n"

    async with running_pool(stuck) as (_, backend, upstream):
        await eventually(lambda: backend.state is State.UP)
        await eventually(lambda: backend.state is State.DOWN)
        assert "no token" in backend.state_reason
        upstream.metrics = upstream.metrics.replace(b"generation_tokens_total 7", b"generation_tokens_total 8")
        await eventually(lambda: backend.state is State.UP)


@pytest.mark.slow
async def test_an_engine_that_stood_still_has_to_serve_a_request_before_it_is_up() -> None:
    """Without requests it looks well: its probes succeed."""
    standing = b"vllm:num_requests_running 1\nvllm:generation_tokens_total 7\nvllm:prompt_tokens_total 7\n"
    async with Upstream("a", "m") as upstream, Upstream("b", "m") as well:
        backends = [Backend(one.name, "m", Method.BASELINE, one.url) for one in (upstream, well)]
        pool, backend = Pool(backends, RULES), backends[0]
        await pool.start()
        try:
            await eventually(lambda: len(pool.up("m")) == 2)
            upstream.metrics = standing
            await eventually(lambda: backend.state is State.DOWN)
            await eventually(lambda: not pool.is_progressing(backend))
            upstream.metrics = standing.replace(b"running 1", b"running 0")
            await eventually(lambda: backend.state is State.RECOVERING)
            assert pool.recovery.is_on_trial(backend)
            pool.report_success(backend)
            assert backend.state is State.UP
        finally:
            await pool.stop()


@pytest.mark.slow
async def test_an_idle_engine_that_produces_no_token_is_up() -> None:
    async with running_pool() as (_, backend, _upstream):
        await eventually(lambda: backend.state is State.UP)
        await stays(lambda: backend.state is State.UP, 0.6)


@pytest.mark.slow
async def test_a_drained_replica_stays_out_until_it_is_readmitted() -> None:
    async with running_pool() as (pool, backend, upstream):
        await eventually(lambda: backend.state is State.UP)
        pool.set_drained(backend, drained=True)
        await stays(lambda: backend.state is State.DRAINING, 0.2)
        pool.report_unreachable(backend, "refused")
        assert backend.state is State.DRAINING
        await upstream.die()
        await stays(lambda: backend.state is State.DRAINING, 0.2)
        pool.set_drained(backend, drained=False)
        await stays(lambda: backend.state is not State.UP, 0.1)
        await upstream.come_back()
        await eventually(lambda: backend.state is State.UP)


# Recovery


def judged(pool: Pool, backend: Backend) -> State:
    """Return the state of a backend after a probe that succeeded."""
    pool._judge(backend, pool._records[backend.model, backend.name], ProbeResult())
    return backend.state


def ejected(*names: str, slow_start_s: float = 10.0) -> tuple[Pool, list[Backend]]:
    """Return a pool whose first backend was ejected, for a time that is over."""
    backends = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", state=State.UP) for name in names]
    pool = Pool(backends, replace(RULES, eject_s=1e-9, eject_max_s=60.0, slow_start_s=slow_start_s))
    strike(pool, backends[0], 1, 2, 3)
    assert backends[0].state is State.EJECTED
    return pool, backends


def test_a_replica_returns_from_an_ejection_on_trial_and_a_served_request_ends_that() -> None:
    pool, (backend, other) = ejected("a", "b")
    assert judged(pool, backend) is State.RECOVERING
    assert judged(pool, backend) is State.RECOVERING
    assert pool.recovery.is_on_trial(backend)
    assert pool.up("m") == [other]
    pool.report_success(backend)
    assert (backend.state, pool.recovery.is_on_trial(backend)) == (State.RECOVERING, False)
    assert "slow start" in backend.state_reason


def test_without_slow_start_a_served_request_brings_a_replica_up() -> None:
    pool, (backend, _) = ejected("a", "b", slow_start_s=0.0)
    assert judged(pool, backend) is State.RECOVERING
    pool.report_success(backend)
    assert (backend.state, pool.recovery.replicas) == (State.UP, {})


def test_one_strike_ejects_a_replica_that_recovers_for_twice_as_long() -> None:
    pool, (backend, _) = ejected("a", "b")
    ejections: list[tuple[str, float, str]] = []
    pool.on_eject = lambda backend, duration_s, reason: ejections.append((backend.name, duration_s, reason))
    assert judged(pool, backend) is State.RECOVERING
    strike(pool, backend, 1)
    assert (backend.state, pool.recovery.replicas) == (State.EJECTED, {})
    assert ejections == [("a", 2e-9, "broke its answer")]


def test_a_replica_that_recovers_is_up_as_soon_as_no_other_is() -> None:
    pool, (backend, other) = ejected("a", "b")
    assert judged(pool, backend) is State.RECOVERING
    pool.report_unreachable(other, "refused")
    assert (backend.state, pool.recovery.replicas) == (State.UP, {})


def test_a_trial_that_no_request_comes_for_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.recovery._MAX_TRIAL_S", 0.0)
    pool, (backend, _) = ejected("a", "b")
    assert judged(pool, backend) is State.RECOVERING
    pool.recovery.begin_trial(backend)
    judged(pool, backend)
    assert pool.recovery.is_on_trial(backend), "it has its request"
    pool.recovery.end_trial(backend)
    judged(pool, backend)
    assert not pool.recovery.is_on_trial(backend)


@pytest.mark.parametrize(("others_up_s", "state"), [(11.0, State.RECOVERING), (9.0, State.UP)])
def test_a_replica_that_was_down_starts_slowly_among_others_that_did_not(others_up_s: float, state: State) -> None:
    backends = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", state=State.UP) for name in "ab"]
    pool = Pool(backends, HealthRules())
    pool.report_unreachable(backends[0], "refused")
    pool._records["m", "b"].up_since_s = time.monotonic() - others_up_s
    assert judged(pool, backends[0]) is state
    assert not pool.recovery.is_on_trial(backends[0])


def test_the_share_of_a_replica_that_starts_slowly_grows_with_time_and_weight() -> None:
    backends = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", state=State.UP) for name in "abc"]
    back, *up = backends
    back.state = State.RECOVERING
    up[0].in_flight, up[1].in_flight = 8, 12
    recovery = Recovery(slow_start_s=10.0)
    recovery.enter(back, on_trial=False, now_s=0.0)

    def bound_at(now_s: float) -> int:
        for back.in_flight in range(100):
            if back not in recovery.candidates(backends, (), may_try=True, now_s=now_s):
                break
        return back.in_flight

    assert [bound_at(now_s) for now_s in (0.0, 5.0, 10.0)] == [1, 5, 10]
    back.weight = 2.0
    assert bound_at(5.0) == 10
    back.in_flight = 100
    assert recovery.candidates([back], (), may_try=True) == [back], "better than none"
    assert recovery.candidates(backends, ("a",), may_try=True) == up


async def test_an_ejection_by_another_gateway_is_not_reported_again_and_spares_the_last_replica() -> None:
    pool, (backend, other) = unprobed("a", "b")
    pool.on_eject = lambda *_: pytest.fail("reported")
    assert pool.eject(backend, 5.0, "failed at another gateway")
    assert backend.state_reason == "failed at another gateway; ejected for 5 s"
    assert not pool.eject(backend, 5.0, "again")
    assert not pool.eject(other, 5.0, "the last one")
    assert judged(pool, backend) is State.EJECTED


@pytest.mark.slow
async def test_an_engine_that_computes_a_long_prompt_without_any_token_is_up() -> None:
    """Until the prompt is complete, vLLM counts no token of it; the KV cache shows that it goes on."""

    def computing(upstream: Upstream) -> None:
        usage = b"vllm:kv_cache_usage_perc 0.%04d\n"
        upstream.metrics = b"vllm:num_requests_running 1\nvllm:generation_tokens_total 7\n" + usage % 1

    async with running_pool(computing) as (pool, backend, upstream):
        await eventually(lambda: backend.state is State.UP)
        parts = iter(range(2, 10_000))

        def goes_on() -> bool:
            upstream.metrics = upstream.metrics.rpartition(b"0.")[0] + b"0.%04d\n" % next(parts)
            return backend.state is State.UP

        await stays(goes_on, 1.0)  # stall_s is 0.4
        assert pool.up("m") == [backend]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_probe_that_fails_in_no_known_way_is_not_the_last(hangs: bool) -> None:
    class Odd(Probe):
        runs = 0

        async def run(self, *, admit: bool) -> ProbeResult:
            self.runs += 1
            if self.runs > 1:
                return ProbeResult()
            if hangs:
                await asyncio.Event().wait()
            raise OSError("not one of httpx")

    backend = Backend("a", "m", Method.BASELINE, "http://127.0.0.1:1")
    pool = Pool([backend], HealthRules(interval_s=0.01, timeout_s=0.05), Odd)
    await pool.start()
    try:
        await eventually(lambda: backend.state is State.UP)
    finally:
        await pool.stop()


async def test_a_replica_whose_first_probe_fails_in_no_known_way_can_join() -> None:
    class Odd(Probe):
        async def run(self, *, admit: bool) -> ProbeResult:
            raise OSError("not one of httpx")

    pool = Pool([], RULES, Odd)
    (joining,) = await pool.probe([Backend("a", "m", Method.BASELINE, "http://127.0.0.1:1")], RULES, 5.0)
    assert joining.result is not None
    assert "OSError" in (joining.result.problem or "")
    await joining.probe.close()
