"""Where the store of a pool is: from the pool file, or a place of its own for each pool file."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from gateway.config.settings import PoolSettings, StateSettings
from gateway.state.sqlite import SqliteStore
from gateway.state.sqlite_file import is_corrupt, probe
from gateway.state.store import StateError, Store

_FOLDER = "speculation-gateway"


def with_place(settings: PoolSettings, config_path: Path, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Return the settings with a file for the state, if they name none and no Redis either; `~` is the user's home."""
    state = settings.state
    if state is None or state.redis is not None:
        return settings
    file = default_file(config_path, environ) if state.file is None else _expanded(state.file)
    return settings.model_copy(update={"state": state.model_copy(update={"file": file})})


def default_file(config_path: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file for a pool file that names none.

    It is in `$STATE_DIRECTORY`, which systemd sets, else in `speculation-gateway` under `$XDG_STATE_HOME` or
    `~/.local/state`; its name is that of the pool file and eight digits that tell pool files of one name apart. A path
    that is a link is not followed: Kubernetes points it elsewhere whenever the file changes.
    """
    digits = hashlib.sha256(os.fsencode(os.path.abspath(config_path))).hexdigest()[:8]
    name = f"{config_path.stem}-{digits}.sqlite"
    if own := environ.get("STATE_DIRECTORY"):
        return Path(own.split(":")[0]) / name
    base = Path(environ.get("XDG_STATE_HOME") or "~/.local/state")
    return _expanded(base) / _FOLDER / name


def _expanded(path: Path) -> Path:
    return Path(os.path.expanduser(path))  # that of Path fails where there is no home


def open_store(state: StateSettings | None) -> Store | None:
    """Return the store that settings name; nothing is opened before it is used. None if nothing is to be kept."""
    if state is None:
        return None
    if state.redis is not None:
        from gateway.state.redis import RedisStore  # its client takes a moment to import, and most have no use for it

        return RedisStore(state.redis.get_secret_value(), state.prefix)
    return SqliteStore(state.file) if state.file is not None else None


def describe(state: StateSettings | None) -> str:
    """Return in one line where what is learned would be kept, and why not if it could not: for `gateway check`.

    A file is tried where there is one, or the nearest folder that exists; Redis is not asked.
    """
    store = open_store(state)
    if state is None or store is None:
        return "What is learned is not kept (state: none)."
    if state.file is not None and (trouble := _trouble(state.file)):
        return f"What is learned would not be kept: {trouble}. The gateway would serve all the same."
    return f"What is learned is kept in {store.place}."


def _trouble(path: Path) -> str:
    if path.exists():
        try:
            probe(path)
        except StateError as error:
            return str(error)
        except sqlite3.Error as error:
            # A broken file does not keep anything from being kept: it is set aside.
            return "" if is_corrupt(error) else f"{path}: {error}"
        return ""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return "" if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"
