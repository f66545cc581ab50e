"""Compilation of an engine's rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from backends.calibration import batch_schedule

_F = TypeVar("_F", bound=Callable[..., Any])


def _cache_folder() -> Path:
    """Return the cache folder of compiled code, a new one for each state of the sources.

    numba checks only the file of a function, and would miss changes to functions it calls.
    """
    here = Path(__file__).parent
    paths = [*sorted(here.glob("*.py")), Path(batch_schedule.__file__)]
    sources = b"".join(path.read_bytes() for path in paths)
    parent = os.environ.get("NUMBA_CACHE_DIR") or here / "__pycache__"
    return Path(parent) / f"rules-{blake2b(sources, digest_size=8).hexdigest()}"


numba.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined] # a setting, set at its import


def compiled(function: _F) -> _F:
    """Return a function that compiles at its first call and is cached on disk.

    If no folder for the cache is writable, each process compiles again.
    """
    try:
        return cast(_F, numba.njit(cache=True)(function))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return cast(_F, numba.njit(function))
