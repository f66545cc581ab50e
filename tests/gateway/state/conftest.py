from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Stores:
    """Opens any number of stores on the same data, which can be wiped."""

    def __init__(self, create: Callable[[], Store], wipe: Callable[[], None]) -> None:
        self._create = create
        self.wipe = wipe
        self._opened: list[Store] = []

    def open(self) -> Store:
        store = self._create()
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(params=["sqlite", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    """Runs a test with each kind of store."""
    if request.param == "sqlite":
        path = tmp_path / "state.sqlite"

        def wipe() -> None:
            for file in tmp_path.glob("state.sqlite*"):
                file.unlink()

        opener = Stores(lambda: SqliteStore(path), wipe)
    else:
        server: RedisServer = request.getfixturevalue("redis")
        opener = Stores(lambda: RedisStore(server.url, "test"), server.flush)
    yield opener
    opener.close()
