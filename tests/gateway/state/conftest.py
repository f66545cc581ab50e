from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store
from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def _shared_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(_shared_redis: RedisServer) -> RedisServer:
    """A running, empty Redis; a test that kills it must start it again."""
    _shared_redis.flush()
    return _shared_redis


@dataclass
class Stores:
    """Opens any number of stores on the same data, which can be wiped."""

    create: Callable[[], Store]
    wipe: Callable[[], None]
    opened: ExitStack

    def open(self) -> Store:
        store = self.create()
        self.opened.callback(store.close)
        return store


@pytest.fixture(params=["sqlite", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    """Runs a test with each kind of store."""

    def wipe() -> None:
        for file in tmp_path.glob("state.sqlite*"):
            file.unlink()

    with ExitStack() as opened:
        if request.param == "sqlite":
            yield Stores(lambda: SqliteStore(tmp_path / "state.sqlite"), wipe, opened)
        else:
            server: RedisServer = request.getfixturevalue("redis")
            yield Stores(lambda: RedisStore(server.url, "test"), server.flush, opened)
