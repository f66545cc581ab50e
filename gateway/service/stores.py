"""What the state is kept in and shared through, by the settings."""

from __future__ import annotations

from pathlib import Path

from gateway.config.settings import StateSettings
from gateway.state.live import Live, LiveFolder
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store


def open_store(state: StateSettings | None) -> Store | None:
    """Return the store of the settings, which opens nothing before it is used; None for `state: none`."""
    if state is None:
        return None
    if state.redis is not None:
        from gateway.state.redis import RedisStore  # slow to import, and an extra

        return RedisStore(state.redis.get_secret_value(), state.prefix)
    return SqliteStore(state.file) if state.file is not None else None


def open_live(state: StateSettings | None, folder: Path | None, writer: str) -> Live | None:
    """Return the exchange with peers: through Redis, or else the folder of workers; None for a lone process."""
    if state is not None and state.redis is not None:
        from gateway.state.live_redis import LiveRedis

        return LiveRedis(state.redis.get_secret_value(), state.prefix, writer)
    return None if folder is None else LiveFolder(folder, writer)


def describe(state: StateSettings | None) -> str:
    """Return one line for `gateway check`: where the state is kept."""
    store = open_store(state)
    return "State is not kept (state: none)." if store is None else f"State is kept in {store.location}."
