"""Changes of a running gateway: what is kept, what requests in flight see, and that nothing is left of what is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends import background
from backends.health import Drain, State
from backends.watch import Watch
from benchmarks.metrics_page import total
from gateway.config.pool_file import PoolFile
from gateway.relay.context import RelayContext
from gateway.routing.keys import digest
from gateway.routing.sticky import Home
from gateway.service.change import Handover, prepare
from gateway.service.replicas import plan
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.replica import STEPS
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, Start, bearer, start_gateway
from tests.support.silence import silence
from tests.support.upstream import END, Upstream, Wire, answer, delta, well


async def change(running: Running, **update: Any) -> None:
    """Reload with other top-level settings, or other `backends` and `policy` of the model."""
    (await prepared(running, **update)).commit()


async def prepared(running: Running, **update: Any) -> Handover:
    raw = running.gateway.settings.model_dump()
    model = raw["models"][MODEL]
    for key in ("backends", "policy", "aliases", "default_temperature", "queue"):
        if key in update:
            model[key] = update.pop(key)
    if "settings" in model["policy"]:
        model["policy"] = {"name": model["policy"]["name"], **model["policy"]["settings"]}
    settings = PoolFile.model_validate(raw | update)
    return await prepare(running.gateway, settings, plan(settings, Path()).backends, digest(ADMIN_KEY))


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    """A gateway with the replicas a and b."""
    async with start_gateway({"a": "baseline", "b": "baseline"}) as started:
        yield started


@pytest.fixture
async def c() -> AsyncIterator[Upstream]:
    """A replica that is not in the pool yet."""
    async with Upstream("c", MODEL) as upstream:
        yield upstream


def backends_of(*upstreams: Upstream) -> dict[str, Any]:
    return {each.name: {"method": "baseline", "url": each.url} for each in upstreams}


async def names(running: Running, requests: int = 6) -> set[str]:
    """Return the backends that answer."""
    return {(await running.chat()).headers["x-gateway-backend"] for _ in range(requests)}


@pytest.mark.slow
async def test_replicas_are_added_and_removed_while_a_stream_goes_on(gateway_of: Start, c: Upstream) -> None:
    go_on = asyncio.Event()

    async def slow(wire: Wire) -> None:
        if not wire.seen.json.get("stream"):
            await well(wire)
            return
        await wire.begin_stream()
        await wire.chunk(delta("first"))
        await go_on.wait()
        await wire.chunk(delta("last"))
        await wire.chunk(END)
        await wire.end_stream()

    async with gateway_of({"a": "baseline", "b": "baseline"}, behaviour=slow) as running:
        a, b = running.upstreams["a"], running.upstreams["b"]
        body = {"model": MODEL, "stream": True, "messages": []}
        headers = {"x-gateway-backend": "a"}
        async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answered:
            lines = answered.aiter_lines()
            assert "first" in await anext(lines)
            kept, old = running.backend("b"), running.backend("a")
            await change(running, backends=backends_of(b, c))
            assert running.backend("b") is kept
            assert running.backend("c").health.state in {State.UP, State.RECOVERING}, "its first probe is waited for"
            assert await names(running) == {"b", "c"}
            assert old.in_flight == 1
            assert running.gateway.leaving
            go_on.set()
            assert "last" in "".join([line async for line in lines])
        await running.until(lambda: not running.gateway.leaving)
        page = running.gateway.metrics.page().decode()
        assert 'backend="a"' not in page
        assert 'backend="c"' in page
        assert old.in_flight == 0
        await change(running, backends=backends_of(a, b, c))
        assert await names(running, 12) == {"a", "b", "c"}


async def test_what_a_replica_is_meant_for_changes_and_it_stays(running: Running) -> None:
    before = running.backend("a")
    backends = backends_of(*running.upstreams.values())
    backends["a"]["weight"] = 3.0
    await change(running, backends=backends)
    answered = [(await running.chat()).headers["x-gateway-backend"] for _ in range(8)]
    assert answered.count("a") == 6
    backends["a"]["context_range"], backends["b"]["context_range"] = "9000-20000", "0-8999"
    handover = await prepared(running, backends=backends)
    handover.planned[MODEL, "a"].flags = ("--max-num-seqs", "64")  # of an engine that the gateway starts
    handover.commit()
    assert running.backend("a") is before
    assert before.flags == ("--max-num-seqs", "64")
    assert await names(running) == {"b"}


async def test_a_reload_brings_no_further_retries(running: Running) -> None:
    now_s = time.monotonic()
    budget = running.gateway.models[MODEL].retry_budget
    while budget.has_one(now_s):
        budget.take()
    await change(running, timeouts={"idle_s": 30.0})
    assert not running.gateway.models[MODEL].retry_budget.has_one(now_s)


@pytest.mark.parametrize("policy", ["least_loaded", "learned"])
async def test_what_was_found_of_requests_that_fail_is_kept(gateway_of: Start, policy: str) -> None:
    async with gateway_of(policy={"name": policy}) as running:
        before = running.gateway.models[MODEL]
        request = RequestFeatures(MODEL, Endpoint.CHAT, shape=("tools",))
        for number in range(200):
            for name in "ab":
                problem = "failed" if name == "b" and number % 3 == 0 else ""
                before.troubles.observe(request, running.backend(name), problem, 1.0)
        assert before.troubles.refresh()
        found = [each.name for each in before.troubles.found]
        assert found
        await change(running, timeouts={"idle_s": 30.0})
        after = running.gateway.models[MODEL]
        assert after is not before
        assert [each.name for each in after.troubles.found] == found


@pytest.mark.slow
async def test_a_replica_with_another_address_is_another_replica(gateway_of: Start, c: Upstream) -> None:
    async with gateway_of({"a": "baseline"}, policy={"name": "learned"}) as running:
        before, statistics = running.backend("a"), running.gateway.models[MODEL].policy.statistics  # type: ignore[attr-defined]
        statistics.add(STEPS, ("a",), *[1.0] * STEPS.width)
        running.gateway.relay.router.locations.remember("resp_1", Home(MODEL, "a"))
        await change(running, backends={"a": {"method": "baseline", "url": c.url}})
        assert running.backend("a") is not before
        assert running.gateway.relay.router.locations.home_of("resp_1") is None
        assert statistics.buckets(STEPS) == {}
        assert (await running.chat()).json()["choices"][0]["message"]["content"] == "from c"
        await running.until(lambda: not running.gateway.leaving)
        assert "gateway_requests_total" in running.gateway.metrics.page().decode()
        assert running.backend("a").engine.metrics is not None, "its record is that of the new one"
        detector: Any = running.gateway.models[MODEL].detector
        silence(detector, "a")
        assert detector.silent["a"].cause == "since_reload"
        await change(running, backends=backends_of(running.upstreams["a"]))
        assert detector.silent == {}


@pytest.mark.slow
async def test_requests_in_flight_keep_their_timeouts(gateway_of: Start) -> None:
    go_on = asyncio.Event()

    async def slow(wire: Wire) -> None:
        await go_on.wait()
        await wire.json(answer("a"))

    timeouts = {"connect_s": 1.0, "first_byte_s": 60.0, "idle_s": 60.0}
    async with gateway_of({"a": "baseline"}, behaviour=slow, timeouts=timeouts) as running:
        first = asyncio.create_task(running.chat())
        await running.until(lambda: len(running.upstreams["a"].seen) == 1)
        await change(running, timeouts=timeouts | {"first_byte_s": 0.1})
        second = await running.chat()
        assert second.status_code == 504
        go_on.set()
        assert (await first).status_code == 200


async def test_keys_and_their_limits_are_replaced_on_open_connections_and_what_was_used_counts(
    gateway_of: Start,
) -> None:
    limited, team = {"name": "team", "key": "sk-team", "requests_per_minute": 3}, bearer("sk-team")
    async with gateway_of({"a": "baseline"}, keys=[limited]) as running:
        assert [(await running.chat(headers=team)).status_code for _ in range(4)] == [200, 200, 200, 429]
        await change(running, keys=[limited | {"requests_per_minute": 2}])
        refused = await running.chat(headers=team)
        assert (refused.status_code, 20 <= int(refused.headers["retry-after"]) <= 30) == (429, True)
        await change(running, keys=[limited | {"requests_per_minute": None}])
        assert (await running.chat(headers=team)).status_code == 200
        await change(running, keys=[{"name": "new", "key": "sk-new"}])
        assert (await running.chat(headers=team)).status_code == 401
        assert (await running.chat(headers=bearer("sk-new"))).status_code == 200


@pytest.mark.slow
async def test_a_removed_model_is_gone_and_an_added_one_is_served(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running, Upstream("n", "new") as upstream:
        model = {"policy": {"name": "least_loaded"}, "backends": backends_of(upstream), "default_temperature": 1.0}
        await change(running, models={"new": model})
        assert (await running.chat()).status_code == 404
        assert (await running.chat(model="new")).status_code == 200
        await running.until(lambda: not running.gateway.leaving)
        assert f'model="{MODEL}"' not in running.gateway.metrics.page().decode()


async def test_what_was_learned_stays_under_other_settings(gateway_of: Start) -> None:
    async with gateway_of(policy={"name": "learned"}) as running:
        for _ in range(5):
            await running.chat(max_tokens=3)
        model = running.gateway.models[MODEL]
        learned = model.policy
        count = learned.statistics.observations  # type: ignore[attr-defined]
        assert count
        await change(running, policy={"name": "learned", "objective": "ttft"})
        later = running.gateway.models[MODEL].policy
        assert later is not learned
        assert later.statistics is learned.statistics  # type: ignore[attr-defined]
        await running.chat(max_tokens=3)
        assert later.statistics.observations > count  # type: ignore[attr-defined]
        await change(running, timeouts={"connect_s": 3.0})
        assert running.gateway.models[MODEL].policy is later
        await change(running, policy={"name": "round_robin", "outlier_ejection": True})
        guarded = running.gateway.models[MODEL].policy
        assert guarded.statistics is learned.statistics  # type: ignore[attr-defined]


def queue_length(running: Running) -> float:
    return total(running.gateway.metrics.page().decode(), "gateway_queue_length")


async def test_what_waits_in_a_removed_queue_is_sent_once_a_replica_is_up(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, queue={"max_in_flight_per_backend": 1}) as running:
        running.gateway.pool.report(running.backend("a"), Drain())
        request = asyncio.create_task(running.chat())
        await running.until(lambda: queue_length(running) == 1)
        await change(running, queue=None)
        running.gateway.pool.report(running.backend("a"), Drain(False))
        async with asyncio.timeout(10.0):
            assert (await request).status_code == 200
        await running.until(lambda: queue_length(running) == 0)


def left(running: Running) -> tuple[int, int, set[str]]:
    """Return the open descriptors, the tasks, and the names of all series."""
    lines = running.gateway.metrics.page().decode().splitlines()
    series = {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}
    return len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks()), series


@pytest.mark.slow
async def test_nothing_is_left_of_replicas_that_come_and_go(running: Running, c: Upstream) -> None:
    a, b = running.upstreams["a"], running.upstreams["b"]
    await names(running)

    async def cycle() -> None:
        for pool in ((b, c), (a, b)):
            await change(running, backends=backends_of(*pool))
            await names(running, 2)

    await cycle()
    await running.until(lambda: not running.gateway.leaving)
    descriptors, tasks, series = left(running)
    for _ in range(4):
        await cycle()
    await running.until(lambda: not running.gateway.leaving)
    await running.until(lambda: left(running)[0] <= descriptors + 2 and left(running)[1] <= tasks + 2)
    assert left(running)[2] == series
    assert len(running.gateway.pool._watches) == 2


async def test_a_change_that_fails_leaves_everything_as_it_was(
    running: Running, c: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: getattr(running.gateway, name) for name in ("settings", "relay", "models")}

    async def raising(*_: object, **__: object) -> None:
        raise httpx.InvalidURL("a defect")

    monkeypatch.setattr(Watch, "probe_now", raising)
    with pytest.raises(httpx.InvalidURL):
        await change(running, backends=backends_of(c), policy={"name": "random"})
    assert {name: getattr(running.gateway, name) for name in before} == before
    assert await names(running) == {"a", "b"}


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["on_change", "ready", "follow", "set_present"])
async def test_a_change_is_made_as_a_whole_although_a_step_of_it_raises(
    running: Running, c: Upstream, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[str] = []
    monkeypatch.setattr(background, "on_failure", [counts.append])

    def broken(*_: object) -> None:
        raise ZeroDivisionError(breaks)

    made = await prepared(running, backends=backends_of(running.upstreams["b"], c), policy={"name": "random"})
    with monkeypatch.context() as patch:
        if breaks == "on_change":
            running.gateway.on_change.insert(0, broken)
        else:
            steps = {"ready": RelayContext, "follow": running.gateway.peers, "set_present": running.gateway.metrics}
            patch.setattr(steps[breaks], breaks, broken)
        made.commit()
    assert counts
    assert await names(running, 30) == {"b", "c"}
    assert running.gateway.models[MODEL].policy.name == "random"
    assert [backend.name for backend in running.gateway.pool] == ["b", "c"]
    assert set(running.gateway.models[MODEL].upstreams) == {"b", "c"}


async def test_a_drained_replica_stays_drained(running: Running, c: Upstream) -> None:
    running.gateway.pool.report(running.backend("a"), Drain())
    await change(running, backends=backends_of(*running.upstreams.values()), aliases=["other"])
    assert (await running.chat(model="other")).headers["x-gateway-backend"] == "b"
    assert running.backend("a").health.state is State.DRAINING
    await change(running, backends=backends_of(running.upstreams["b"]) | {"a": {"method": "baseline", "url": c.url}})
    assert running.backend("a").health.state is State.DRAINING
    running.gateway.pool.report(running.backend("a"), Drain(False))
    await running.until_up("a")
