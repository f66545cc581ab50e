"""A gateway that hears what engines tell of their caches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq
from pydantic import ValidationError

from backends.launch.ports import free_port
from gateway.config.pool_file import PoolFile
from gateway.config.settings import PoolSettings
from gateway.gateway import join
from gateway.rooms.kv_events import room
from gateway.rooms.kv_events.room import KvEventsRoom
from tests.gateway.conftest import Running, start_gateway
from tests.gateway.rooms.kv_events.test_cache import message, removed, stored
from tests.support.upstream import Wire
from tests.support.waiting import TIMEOUT_S, eventually_async

TEXT = "A conversation that is long enough for a prefix cache. " * 40
LEARNED = {"name": "learned", "guardrail": {"share": 0}}


class Publisher:
    """What an engine publishes."""

    def __init__(self) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(self.endpoint)
        self.number = 0

    def tell(self, *events: Any) -> None:
        self.send(message(self.number, *events))
        self.number += 1

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close(linger=0)


def publisher() -> Iterator[Publisher]:
    published = Publisher()
    yield published
    published.close()


engine, other = (pytest.fixture(publisher, name=name) for name in ("engine", "other"))
BOTH = {"a": "baseline", "b": "baseline"}


async def answer(wire: Wire) -> None:
    """Answer with 400 of 500 prompt tokens cached."""
    usage = {"prompt_tokens": 500, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 400}}
    await wire.json({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
async def running(engine: Publisher) -> AsyncIterator[Running]:
    """A gateway with one replica that tells what it has cached."""
    async with start_gateway({"a": "baseline"}, LEARNED, behaviour=answer, kv_events={"a": engine.endpoint}) as started:
        yield started


async def note(running: Running) -> str:
    """Return what is expected of replica `a` for the text."""
    return (await running.notes(TEXT))["a"]


async def until_noted(running: Running, text: str) -> None:
    """Wait for a note."""

    async def is_noted() -> bool:
        return text in await note(running)

    await eventually_async(is_noted)


@pytest.mark.slow
async def test_what_an_engine_tells_decides_what_is_expected_there(
    running: Running, engine: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.rooms.kv_events.room")
    assert (await running.chat(TEXT)).status_code == 200
    await until_noted(running, "tokens of the prompt cached, by estimate")
    await until_heard(running, engine)
    await running.chat(TEXT)
    await until_noted(running, "tokens of the prompt cached, by events")
    assert "m/a: what it has cached is expected by its events" in caplog.text
    for _ in range(3):
        await running.chat(TEXT)
    assert await running.counted("gateway_kv_events_known", backend="a") == 1
    assert await running.counted("gateway_prefix_tokens_total", outcome="found", source="events") == 1200
    missed = await running.counted("gateway_prefix_tokens_total", outcome="missed", source="events")
    assert missed > 0, "some 550 are expected"
    engine.tell(stored(5))
    engine.tell({"type": "AllBlocksCleared"})
    await running.until(lambda: _cache(running).evicted_s > 0)
    while "cached" in await note(running):
        pass
    await running.chat(TEXT)
    await until_noted(running, "tokens of the prompt cached, by events")
    engine.tell("nonsense")
    await until_noted(running, "tokens of the prompt cached, by estimate")
    assert await running.counted("gateway_kv_events_problems_total", kind="nonsense") == 1
    assert await running.counted("gateway_kv_events_known", backend="a") == 0


def _room(running: Running) -> KvEventsRoom:
    (found,) = [each for each in running.gateway.rooms if isinstance(each, KvEventsRoom)]
    return found


def _cache(running: Running, name: str = "a") -> Any:
    return _room(running)._engines["m", name].cache


async def until_heard(running: Running, engine: Publisher, name: str = "a") -> None:
    """Publish a block and its eviction until the gateway, which subscribes at some time, has received one."""

    def hears() -> bool:
        engine.tell(stored(engine.number))
        engine.tell(removed(engine.number - 1))
        return ("m", name) in _room(running)._engines and bool(_cache(running, name).is_known)

    await running.until(lambda: name in running.upstreams and hears())
    await running.until(lambda: _cache(running, name)._number == engine.number - 1)


async def until_evicted(running: Running, engine: Publisher) -> None:
    """Publish blocks and their evictions until the gateway has read of one that was used after now.

    The thread that reads notes the time before it receives a message, so the first one may count as older.
    """
    since_s = time.monotonic()

    def has_gone() -> bool:
        engine.tell(stored(engine.number))
        engine.tell(removed(engine.number - 1))
        return bool(_cache(running).evicted_s > since_s)

    await running.until(has_gone)


NESTED = [b"", bytes(8), b"\x92\xca\0\0\0\0" + b"\x91" * 100_000 + b"\xc0"]
ATTACKS = {
    "nesting": NESTED,
    "a group that cannot be hashed": message(0, stored(1, group_idx=[7])),
    "many hashes": message(0, stored(*range(30_000))),
    "a long message": [b"", bytes(8), bytes(16 << 20)],
    "many frames": [b""] * 200,
}


@pytest.mark.slow
@pytest.mark.parametrize("frames", ATTACKS.values(), ids=ATTACKS.keys())
async def test_what_one_engine_sends_delays_the_events_of_no_other(
    frames: list[bytes], engine: Publisher, other: Publisher
) -> None:
    async with start_gateway(BOTH, LEARNED, kv_events={"a": engine.endpoint, "b": other.endpoint}) as running:
        await until_heard(running, engine, "a")
        await until_heard(running, other, "b")
        longest_s = 0.0
        for _ in range(10):
            for _ in range(20):
                engine.send(frames)
            began_s = time.monotonic()
            other.tell(stored(other.number))
            await running.until(lambda: _cache(running, "b")._number == other.number - 1)
            longest_s = max(longest_s, time.monotonic() - began_s)
        assert _cache(running, "b").is_known
        assert longest_s < 2.0, "they were late by up to 30 s"


async def test_engines_together_have_a_bounded_number_of_blocks(
    engine: Publisher, other: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_MOST_BLOCKS", 100)
    async with start_gateway(BOTH, LEARNED, kv_events={"a": engine.endpoint, "b": other.endpoint}) as running:
        await until_heard(running, engine, "a")
        await until_heard(running, other, "b")
        other.tell(stored(*range(1000, 1030)))
        engine.tell(stored(*range(90)))
        await running.until(lambda: not _cache(running, "a").is_known)
        assert len(_cache(running, "a")) == 0
        assert _cache(running, "b").is_known, "the one with most of them is not followed"


async def test_an_engine_whose_events_are_no_longer_read_is_expected_by_what_was_sent_there(
    running: Running, engine: Publisher
) -> None:
    await until_heard(running, engine)
    await running.chat(TEXT)
    _room(running).tick()
    await until_noted(running, "by events")
    backends = running.gateway.settings.models["m"].backends
    backends["a"] = backends["a"].model_copy(update={"kv_events": None})
    join(running.gateway)
    assert "cached, by estimate" in await note(running)
    await running.until(lambda: not _room(running)._engines)


def test_a_connection_to_a_host_that_has_vanished_is_given_up() -> None:
    """Such a host has closed nothing: without the heartbeats of ZeroMQ it would stay open for ever."""
    with room._subscribed("tcp://127.0.0.1:9") as socket:
        assert socket.get(zmq.HEARTBEAT_IVL) == room._HEARTBEAT_MS


@pytest.mark.slow
async def test_an_engine_that_tells_nothing_while_it_works_is_not_believed(
    running: Running, engine: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_LATE_S", 0.5)
    await until_heard(running, engine)
    await running.chat(TEXT)
    await until_noted(running, "by events")
    running.backend("a").in_flight += 1
    await until_noted(running, "by estimate")
    running.backend("a").in_flight -= 1
    await until_noted(running, "by events")


async def test_what_a_request_in_flight_uses_is_not_evicted(engine: Publisher) -> None:
    may_end = asyncio.Event()

    async def hold(wire: Wire) -> None:
        await may_end.wait()
        await answer(wire)

    held: dict[str, Any] = {"behaviour": hold, "timeouts": {"first_byte_s": TIMEOUT_S}}
    async with start_gateway({"a": "baseline"}, LEARNED, kv_events={"a": engine.endpoint}, **held) as running:
        await until_heard(running, engine)
        running.gateway.relay.router.sent = sent = deque()
        join(running.gateway)
        asked = asyncio.create_task(running.chat(TEXT))
        await running.until(lambda: running.backend("a").in_flight == 1)
        await until_evicted(running, engine)
        _room(running).tick()
        assert "tokens of the prompt cached, by events" in await note(running)
        assert len(sent) == 1
        may_end.set()
        assert (await asked).status_code == 200
        await running.until(lambda: len(sent) == 2)
        assert {backend.name for backend, _ in sent} == {"a"}, "other gateways are told when it ends, too"
        await until_evicted(running, engine)
        _room(running).tick()
        assert "cached" not in await note(running)


def pool_with(kv_events: str) -> PoolSettings:
    backend = {"url": "http://a:1", "method": "baseline", "kv_events": kv_events}
    return PoolFile.model_validate({"models": {"m": {"backends": {"a": backend}}}})


@pytest.mark.parametrize("address", ["tcp://engine-0:5557", "ipc:///run/vllm/events"])
def test_what_is_not_installed_is_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KvEventsRoom.problem(pool_with(address)) == ""
    monkeypatch.setattr(room, "find_spec", lambda _: None)
    assert "pyzmq and msgspec" in KvEventsRoom.problem(pool_with(address))


@pytest.mark.parametrize("address", ["tcp://*:5557", "http://engine-0:5557", "tcp://engine-0"])
def test_an_address_is_checked(address: str) -> None:
    with pytest.raises(ValidationError, match="kv_events"):
        pool_with(address)
