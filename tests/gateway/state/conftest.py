from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store
from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def _one_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(_one_redis: RedisServer) -> RedisServer:
    """A Redis that runs and is empty; whoever kills it starts it again."""
    _one_redis.flush()
    return _one_redis


class Place:
    """Somewhere that stores are, and what can happen there."""

    def __init__(self, make: Callable[[], Store], wipe: Callable[[], None]) -> None:
        self._make = make
        self.wipe = wipe
        self._open: list[Store] = []

    def store(self) -> Store:
        store = self._make()
        self._open.append(store)
        return store

    def close(self) -> None:
        for store in self._open:
            store.close()


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Every store must pass the tests that take this."""
    if request.param == "sqlite":
        path = tmp_path / "state.sqlite"

        def wipe() -> None:
            for file in tmp_path.glob("state.sqlite*"):
                file.unlink()

        made = Place(lambda: SqliteStore(path), wipe)
    else:
        server: RedisServer = request.getfixturevalue("redis")
        made = Place(lambda: RedisStore(server.url, "test"), server.flush)
    yield made
    made.close()
