"""Gateways that exchange reports through a real Redis that is killed, frozen, emptied, slow, or holds other things."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.peers import exchange as peer_exchange
from gateway.peers import peers
from gateway.peers.exchange import PeerExchange
from gateway.peers.live_redis import LiveRedis
from gateway.state import redis_client
from gateway.state.store import StateError
from gateway.telemetry.registry import Registry
from tests.gateway.peers.test_peers import admits
from tests.support.peer_process import PeerProcess
from tests.support.redis_server import RedisServer, redis_server
from tests.support.registered_metrics import value_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def _redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    monkeypatch.setattr(redis_client, "_ANSWER_S", 0.3)
    monkeypatch.setattr(peer_exchange, "SILENT_S", 1.5)
    monkeypatch.setattr(peers, "SILENT_S", 1.5)
    _redis.flush()
    return _redis


class Gateway(PeerProcess):
    """A process with its exchange."""

    def __init__(self, url: str) -> None:
        super().__init__(time.monotonic)
        self.registry = Registry()
        self.live = LiveRedis(url, "test", self.peers.writer)
        self.exchange = PeerExchange(self.peers, self.live, self.registry)

    @property
    def failures(self) -> int:
        return self.exchange._failures

    def peers_seen(self) -> float:
        return value_of(self.registry, "gateway_peers")


@contextlib.asynccontextmanager
async def two_gateways(redis: RedisServer) -> AsyncIterator[list[Gateway]]:
    """Start gateways, and wait until they know each other."""
    started = [Gateway(redis.url) for _ in range(2)]
    for gateway in started:
        gateway.exchange.start()
    try:
        await eventually(lambda: all(gateway.peers_seen() == 1 for gateway in started), what="each knows the other")
        yield started
    finally:
        for gateway in started:
            await gateway.exchange.stop()


@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_each_goes_by_what_it_knows_while_redis_is_away(redis: RedisServer, how: str) -> None:
    async with two_gateways(redis) as started:
        one, two = started
        two.backends[0].in_flight = 4
        await eventually(lambda: one.load() == [4, 0])
        (redis.kill if how == "killed" else redis.freeze)()
        try:
            await eventually(lambda: one.failures)
            assert one.load() == [4, 0], "the last that is known"
            await eventually(lambda: one.peers_seen() == two.peers_seen() == 0)
            assert sum(admits(one.limits) for _ in range(70)) >= 59, "each goes by its own counts"
            one.backends[0].in_flight = 1
        finally:
            (redis.start if how == "killed" else redis.thaw)()
        await eventually(lambda: one.load() == two.load() == [5, 0] and one.peers_seen() == two.peers_seen() == 1)
        assert 0 < redis.client.ttl("test:live") <= 120
        await started.pop().exchange.stop()
        assert redis.client.hkeys("test:live") == [one.peers.writer.encode()]
        await eventually(lambda: one.peers_seen() == 0, what="forgotten")


async def test_another_kind_of_failure_is_logged_too(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["unreachable", "unreachable", "refused", "refused"]
    gateway = Gateway(redis.url)

    def fail(*_: object) -> list[bytes]:
        raise StateError(kinds.pop(0), "why")

    monkeypatch.setattr(gateway.live, "exchange", fail)
    for _ in range(4):
        assert not await gateway.exchange._exchange()
    await gateway.exchange.stop()
    assert [line.partition(":")[0] for line in caplog.messages] == ["unreachable", "refused"]
