"""Defaults that depend on the pool file's path and the environment: the state file and the admin key."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from gateway.config.settings import PoolSettings

_FOLDER = "speculation-gateway"


def with_admin_key(settings: PoolSettings, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Return the settings with `GATEWAY_ADMIN_KEY` as admin key, if they name none and it is not one of `keys`.

    A key of `keys` may do what its `admin` says, and no more.
    """
    key = environ.get("GATEWAY_ADMIN_KEY", "").strip()
    given = hashlib.sha256(key.encode()).hexdigest()
    if settings.admin.sha256 is not None or not key or given in {key.sha256 for key in settings.keys}:
        return settings
    return settings.model_copy(update={"admin": settings.admin.model_copy(update={"sha256": given})})


def with_state_file(settings: PoolSettings, config_path: Path, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Return the settings with the default file of the state if they set neither a file nor Redis, and `~` expanded."""
    state = settings.state
    if state is None or state.redis is not None:
        return settings
    file = default_file(config_path, environ) if state.file is None else _expanded(state.file)
    return settings.model_copy(update={"state": state.model_copy(update={"file": file})})


def default_file(config_path: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default state file of a pool file.

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
