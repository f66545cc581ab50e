"""The folder of one run of the gateway, which its processes share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

PEERS = "peers"
"""Folder of the reports of workers."""

_LAUNCHED = "launched.json"


def write_launched(run_dir: Path, launched: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the state of the processes of replicas, by `model/backend`."""
    written = run_dir / f"{_LAUNCHED}.new"
    written.write_bytes(orjson.dumps(launched))
    written.replace(run_dir / _LAUNCHED)


def read_launched(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return what was written last."""
    path = run_dir / _LAUNCHED
    found: dict[str, dict[str, Any]] = orjson.loads(path.read_bytes()) if path.exists() else {}
    return found
