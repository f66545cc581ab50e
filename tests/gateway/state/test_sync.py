"""Synchronisation of several gateways on one event loop, with a Redis that fails in every way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backends import background
from gateway.state import redis_client, sync
from gateway.state.documents import Document
from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import StateError, Store
from gateway.state.sync import State
from gateway.telemetry.registry import Registry
from policies.statistics import Statistics
from tests.gateway.state.conftest import Stores
from tests.support.redis_server import RedisServer
from tests.support.registered_metrics import value_of
from tests.support.state_member import LENGTH, STEPS, Clock
from tests.support.waiting import TIMEOUT_S, eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "PERIOD_S", 0.03)
    monkeypatch.setattr(sync, "_MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(sync, "_MAX_BACKOFF_S", 0.1)
    monkeypatch.setattr(redis_client, "_ANSWER_S", 0.3)


class Gateway:
    """The parts of a gateway under test: statistics, state and metrics."""

    def __init__(self, store: Store | None, clock: Clock) -> None:
        self.statistics = Statistics((LENGTH, STEPS), clock)
        self.registry = Registry()
        self.state = State(store, {"m": self.statistics}, self.registry)

    def observe(self, value: float) -> None:
        self.statistics.add(LENGTH, ("k",), 1.0, value)

    @property
    def known(self) -> tuple[float, float]:
        count, total = self.statistics.buckets(LENGTH).get(("k",), (0.0, 0.0))
        return round(count, 6), round(total, 6)

    def value(self, name: str, **labels: str) -> float:
        return value_of(self.registry, name, **labels)

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


@pytest.mark.slow
async def test_a_redis_that_is_lost_or_hangs_stops_nobody(redis: RedisServer) -> None:
    clock = Clock()
    gateways = [Gateway(RedisStore(redis.url, "test"), clock) for _ in range(3)]
    polls = 0

    def all_know(count: float, total: float) -> bool:
        return all(each.known == (count, total) for each in gateways)

    def none_is_connected() -> bool:
        nonlocal polls
        polls += 1
        return not any(each.is_connected for each in gateways)

    try:
        async with asyncio.timeout(TIMEOUT_S), running(*gateways):
            for gateway in gateways:
                gateway.observe(1.0)
            await eventually(lambda: all_know(3.0, 3.0))
            redis.kill()
            await eventually(none_is_connected)
            for gateway in gateways:
                gateway.observe(2.0)
            assert all_know(4.0, 5.0), "each continues with what it knew"
            await asyncio.to_thread(redis.start)
            await eventually(lambda: all_know(6.0, 9.0))
            assert gateways[0].value("gateway_state_errors_total", kind="unreachable")
            assert sum(each.value("gateway_state_errors_total", kind="lost") for each in gateways)
            redis.freeze()
            polls = 0
            await eventually(none_is_connected)
            assert polls > 5, "the loop must run while the thread waits for a reply"
            assert gateways[0].value("gateway_state_errors_total", kind="timeout")
            gateways[1].observe(5.0)
            with pytest.raises(StateError):
                await gateways[2].state.documents.put("m/rules", "text", after=0)
            redis.thaw()
            await eventually(lambda: all_know(7.0, 14.0))
            redis.freeze()  # and stopping does not wait for it
            gateways[0].observe(1.0)
    finally:
        redis.kill()
        redis.start()


async def test_the_last_observations_are_pushed_at_stop(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "PERIOD_S", 3600.0)  # synchronise only at start and stop
    clock = Clock()
    first = Gateway(stores.open(), clock)
    async with running(first):
        first.observe(5.0)
    second = Gateway(stores.open(), clock)
    async with running(second):
        assert second.known == (1.0, 5.0), "known before the first request"


@pytest.mark.parametrize("breaks", ["watcher", "exchange"])
async def test_it_goes_on_after_what_nobody_expects(
    stores: Stores, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    clock = Clock()
    writer, reader = [Gateway(stores.open(), clock) for _ in range(2)]
    failures, seen = iter([ZeroDivisionError()]), []

    def fail_once(document: Document | None) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        if document is not None:
            seen.append(document.name)

    reader.state.documents.watch("m/a", fail_once)
    reader.state.documents.watch("m/b", fail_once)
    if breaks == "exchange":
        note = reader.state._note_success
        monkeypatch.setattr(reader.state, "_note_success", lambda *told: [each(*told) for each in (fail_once, note)])
    async with running(writer, reader):
        for name in ("m/a", "m/b"):
            await writer.state.documents.put(name, "one", after=0)
        writer.observe(2.0)
        await eventually(lambda: reader.known == (1.0, 2.0) and len(seen) >= 1)


async def test_an_unused_store_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    idle = State(SqliteStore(path), {}, Registry())
    await idle.start()
    assert not path.exists()
    await idle.documents.put("m/rules", "one", after=0)
    await idle.stop()
    late = State(SqliteStore(path), {}, Registry())
    late.documents.watch("m/rules", lambda _: None)
    await late.start()
    assert [document.text for document in late.documents.history("m/rules")] == ["one"]
    await late.stop()


def test_without_a_store_dropped_statistics_are_forgotten() -> None:
    dropped = [Statistics([LENGTH], Clock()) for _ in range(3)]
    state = State(None, {}, Registry())
    for statistics in dropped:
        state.follow({"m": statistics})
    state.follow({})
    assert not state._leaving


async def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    gateway = Gateway(SqliteStore(tmp_path / "file" / "state.sqlite"), Clock())
    async with running(gateway):
        await eventually(lambda: gateway.value("gateway_state_errors_total", kind="unwritable") >= 3)
        gateway.observe(1.0)
        assert gateway.known == (1.0, 1.0)
        assert gateway.value("gateway_state_connected") == 0
        (tmp_path / "file").unlink()
        await eventually(lambda: gateway.is_connected)
    assert caplog.text.count("unwritable") == 1


async def test_another_kind_of_failure_is_logged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(tmp_path / "state.sqlite")
    kinds = [*["unreachable"] * 3, *["refused"] * 3]  # Redis is back, with another password

    def fail() -> dict[str, str]:
        raise StateError(kinds.pop(0) if kinds else "refused", "why")

    with monkeypatch.context() as broken:
        broken.setattr(store, "stamps", fail)
        gateway = Gateway(store, Clock())
        async with running(gateway):
            await eventually(lambda: not kinds)
            broken.undo()
            await eventually(lambda: gateway.is_connected)
    lines = [line for line in caplog.messages if "until the store is back" in line]
    assert [line.partition(":")[0] for line in lines] == ["unreachable", "refused"]
