"""State as gateways run it: several on one loop, with a Redis that fails in every way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gateway.state import State, StateError, sync
from gateway.state import redis as redis_store
from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import ERRORS, Store
from gateway.telemetry.metrics import Metrics
from policies.statistics import Statistics
from tests.gateway.state.conftest import Place
from tests.support.redis_server import RedisServer
from tests.support.state_member import LENGTH, STEPS, Clock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "PERIOD_S", 0.03)
    monkeypatch.setattr(sync, "_LEAST_PAUSE_S", 0.01)
    monkeypatch.setattr(sync, "_MAX_BACKOFF_S", 0.1)
    monkeypatch.setattr(redis_store, "_ANSWER_S", 0.3)


class Gateway:
    """What of a gateway takes part: an experience, the state around it, and the series it counts in."""

    def __init__(self, store: Store | None, clock: Clock) -> None:
        self.statistics = Statistics((LENGTH, STEPS), clock)
        self.metrics = Metrics()
        bound = None if store is None else self.metrics.bind_state(store.kind, ERRORS)
        self.state = State(store, {"m": self.statistics}, bound)

    def observe(self, value: float) -> None:
        self.statistics.add(LENGTH, ("k",), 1.0, value)

    @property
    def known(self) -> tuple[float, float]:
        count, total = self.statistics.buckets(LENGTH).get(("k",), (0.0, 0.0))
        return round(count, 6), round(total, 6)

    def value(self, name: str, **labels: str) -> float | None:
        self.metrics.flush()
        store = self.state._store
        assert store is not None
        return self.metrics.registry.get_sample_value(name, {"store": store.kind, **labels})

    @property
    def is_connected(self) -> bool:
        return self.value("gateway_state_connected") == 1


@contextlib.asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    for gateway in gateways:
        await gateway.state.start()
    try:
        yield
    finally:
        await asyncio.gather(*(gateway.state.stop() for gateway in gateways))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def three(redis: RedisServer) -> list[Gateway]:
    clock = Clock()
    return [Gateway(RedisStore(redis.url, "test"), clock) for _ in range(3)]


@pytest.fixture
def failing(redis: RedisServer) -> Iterator[RedisServer]:
    """A Redis that runs again afterwards, whatever was done to it."""
    yield redis
    redis.kill()
    redis.start()


async def test_three_gateways_know_the_same(three: list[Gateway]) -> None:
    async with running(*three):
        for number, gateway in enumerate(three):
            for value in range(10):
                gateway.observe(float(number + value))
                await asyncio.sleep(0.005)
        await until(lambda: all(one.known == (30.0, 165.0) for one in three))
        assert all(one.is_connected for one in three)
        assert sum(one.value("gateway_state_rows_total", direction="pushed") or 0 for one in three) >= 3
        assert all((one.value("gateway_state_last_sync_timestamp_seconds") or 0) > 1.7e9 for one in three)


async def test_a_redis_that_dies_and_comes_back_empty(
    three: list[Gateway], failing: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with running(*three):
            for gateway in three:
                gateway.observe(1.0)
            await until(lambda: all(one.known == (3.0, 3.0) for one in three))
            failing.kill()
            await until(lambda: not any(one.is_connected for one in three))
            for gateway in three:
                gateway.observe(2.0)
            assert all(one.known == (4.0, 5.0) for one in three), "each goes on alone, with what it knew"
            await asyncio.to_thread(failing.start)
            await until(lambda: all(one.known == (6.0, 9.0) for one in three))
            assert all(one.is_connected for one in three)
            assert three[0].value("gateway_state_errors_total", kind="unreachable")
            assert sum(one.value("gateway_state_errors_total", kind="lost") or 0 for one in three)
    assert caplog.text.count("stays here until it is back") == 3
    assert caplog.text.count(f"is kept in redis://127.0.0.1:{failing.port}/0") == 6


async def test_a_redis_that_is_wiped(three: list[Gateway], redis: RedisServer) -> None:
    async with running(*three):
        for gateway in three:
            gateway.observe(1.0)
        await until(lambda: all(one.known == (3.0, 3.0) for one in three))
        redis.flush()
        for gateway in three[:2]:
            gateway.observe(2.0)
        await until(lambda: all(one.known == (5.0, 7.0) for one in three))


async def test_a_redis_that_hangs_holds_nobody_up(three: list[Gateway], failing: RedisServer) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    async with running(*three):
        three[0].observe(1.0)
        await until(lambda: all(one.known == (1.0, 1.0) for one in three))
        failing.freeze()
        turning = asyncio.create_task(turn())
        await until(lambda: not any(one.is_connected for one in three))
        turning.cancel()
        assert turns > 5, "the loop went on while the thread waited for an answer"
        assert three[0].value("gateway_state_errors_total", kind="timeout")
        three[1].observe(5.0)
        with pytest.raises(StateError):
            await three[2].state.documents.put("m/rules", "text", after=0)
        failing.thaw()
        await until(lambda: all(one.known == (2.0, 6.0) for one in three))


async def test_stopping_does_not_wait_for_a_redis_that_hangs(three: list[Gateway], failing: RedisServer) -> None:
    async with asyncio.timeout(15.0):
        async with running(*three):
            failing.freeze()
            three[0].observe(1.0)


async def test_a_gateway_starts_without_its_redis(three: list[Gateway], failing: RedisServer) -> None:
    failing.kill()
    async with running(*three):
        assert not any(one.state.is_connected for one in three)
        three[0].observe(1.0)
        await asyncio.to_thread(failing.start)
        await until(lambda: all(one.known == (1.0, 1.0) for one in three))


async def test_what_was_observed_last_is_pushed_at_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "PERIOD_S", 3600.0)  # only at start and at the end
    clock = Clock()
    first = Gateway(place.store(), clock)
    async with running(first):
        first.observe(5.0)
    second = Gateway(place.store(), clock)
    async with running(second):
        assert second.known == (1.0, 5.0), "it is there before the first request"


async def test_a_change_reaches_whoever_watches(place: Place) -> None:
    clock = Clock()
    gateways = [Gateway(place.store(), clock) for _ in range(3)]
    seen: list[list[str]] = [[], [], []]
    for gateway, texts in zip(gateways, seen, strict=True):
        gateway.state.documents.watch("m/rules", lambda document, texts=texts: texts.append(document.text))  # type: ignore[misc]
    async with running(*gateways):
        await gateways[0].state.documents.put("m/rules", "one", after=0)
        assert seen[0] == ["one"]
        await until(lambda: seen == [["one"]] * 3)
        await gateways[1].state.documents.put("m/rules", "two", after=1)
        await until(lambda: seen == [["one", "two"]] * 3)


async def test_nothing_is_opened_where_nothing_is_to_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    idle = State(SqliteStore(path), {})
    await idle.start()
    assert not path.exists()
    await idle.documents.put("m/rules", "one", after=0)
    await idle.stop()
    late = State(SqliteStore(path), {})
    late.documents.watch("m/rules", lambda _: None)
    await late.start()
    assert [one.text for one in late.documents.history("m/rules")] == ["one"]
    await late.stop()


async def test_without_a_store_nothing_is_kept_and_that_is_said() -> None:
    alone = Gateway(None, Clock())
    async with running(alone):
        alone.observe(1.0)
        with pytest.raises(StateError, match="state: none"):
            await alone.state.documents.put("m/rules", "one", after=0)
        assert alone.state.documents.get("m/rules") is None
    assert alone.known == (1.0, 1.0)


async def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    gateway = Gateway(SqliteStore(tmp_path / "file" / "state.sqlite"), Clock())
    async with running(gateway):
        await until(lambda: (gateway.value("gateway_state_errors_total", kind="unwritable") or 0) >= 3)
        gateway.observe(1.0)
        assert gateway.known == (1.0, 1.0)
        assert gateway.value("gateway_state_connected") == 0
        (tmp_path / "file").unlink()
        await until(lambda: gateway.is_connected)
    assert caplog.text.count("unwritable") == 1
