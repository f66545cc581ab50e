"""Location of a pool's store: from the pool file, or a default file per pool file."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from gateway.config.settings import PoolSettings, StateSettings
from gateway.state.live import Live, LiveFolder
from gateway.state.sqlite import SqliteStore, is_corrupt, probe
from gateway.state.store import StateError, Store

_FOLDER = "speculation-gateway"


def with_state_file(settings: PoolSettings, config_path: Path, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Return the settings with the default file of the state if they set neither a file nor Redis, and `~` expanded."""
    state = settings.state
    if state is None or state.redis is not None:
        return settings
    file = default_file(config_path, environ) if state.file is None else _expanded(state.file)
    return settings.model_copy(update={"state": state.model_copy(update={"file": file})})


def default_file(config_path: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default file of a pool file.

    It is in `$STATE_DIRECTORY`, which systemd sets, or else in `speculation-gateway` under `$XDG_STATE_HOME` or
    `~/.local/state`. Its name is that of the pool file with eight digits of a hash of its path. Links are not resolved:
    Kubernetes changes their targets whenever the file changes.

    Examples
    --------
    >>> default_file(Path("/etc/gateway/pool.yaml"), {"STATE_DIRECTORY": "/var/lib/gateway"})
    PosixPath('/var/lib/gateway/pool-6d6d4fab.sqlite')
    """
    digits = hashlib.sha256(os.fsencode(os.path.abspath(config_path))).hexdigest()[:8]
    name = f"{config_path.stem}-{digits}.sqlite"
    if directories := environ.get("STATE_DIRECTORY"):
        return Path(directories.split(":")[0]) / name
    base = Path(environ.get("XDG_STATE_HOME") or "~/.local/state")
    return _expanded(base) / _FOLDER / name


def _expanded(path: Path) -> Path:
    return Path(os.path.expanduser(path))  # Path.expanduser raises where there is no home directory


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
    """Return one line for `gateway check`: where the state is kept, or why it cannot be.

    An existing file, or else its nearest existing folder, is checked for access; Redis is not contacted.
    """
    store = open_store(state)
    if state is None or store is None:
        return "State is not kept (state: none)."
    if state.file is not None and (obstacle := _obstacle(state.file)):
        return f"State would not be kept: {obstacle}. The gateway would still serve requests."
    return f"State is kept in {store.location}."


def _obstacle(path: Path) -> str:
    if path.exists():
        try:
            probe(path)
        except StateError as error:
            return str(error)
        except sqlite3.Error as error:
            # A corrupt file is no obstacle: it is renamed when the gateway starts.
            return "" if is_corrupt(error) else f"{path}: {error}"
        return ""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return "" if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"
