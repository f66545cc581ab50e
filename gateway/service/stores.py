"""Where the processes of a pool keep what they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from backends.files.own_folder import make_own
from gateway.config.settings import PoolSettings, StateSettings
from gateway.peers.live import Live, LiveFolder
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store

PEERS = "peers"
"""Folder of the workers' reports, in the run folder."""

_LAUNCHED = "launched.json"


def open_store(state: StateSettings | None) -> Store | None:
    """Return the store of the settings, not opened yet; None for `state: none`."""
    if state is None:
        return None
    if state.redis is not None:
        from gateway.state.redis import RedisStore  # slow to import, and an extra

        return RedisStore(state.redis.get_secret_value(), state.prefix)
    return SqliteStore(state.file) if state.file is not None else None


def open_lives(settings: PoolSettings, run_dir: Path | None, writer: str) -> list[Live]:
    """Return where to exchange reports with peers: in Redis, and between workers in a folder, which never fails."""
    lives: list[Live] = []
    if run_dir is not None and settings.server.workers > 1:
        lives.append(LiveFolder(run_dir / PEERS, writer))
    if settings.state is not None and settings.state.redis is not None:
        from gateway.peers.live_redis import LiveRedis

        lives.append(LiveRedis(settings.state.redis.get_secret_value(), settings.state.prefix, writer))
    return lives


def describe(state: StateSettings | None) -> str:
    """Return one line for `gateway check`: where the state is kept."""
    store = open_store(state)
    return "State is not kept (state: none)." if store is None else f"State is kept in {store.location}."


def write_launched(run_dir: Path, launched: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the state of the processes of replicas, by `model/backend`."""
    make_own(run_dir)  # again, if somebody has removed it
    written = run_dir / f"{_LAUNCHED}.new"
    written.write_bytes(orjson.dumps(launched))
    written.replace(run_dir / _LAUNCHED)


def read_launched(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the state that was last written; empty if none was."""
    path = run_dir / _LAUNCHED
    found: dict[str, dict[str, Any]] = orjson.loads(path.read_bytes()) if path.exists() else {}
    return found
