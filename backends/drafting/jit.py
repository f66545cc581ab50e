"""Compilation with numba; the only module that imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numba
from numba.extending import register_jitable

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, **options: Any) -> F:
    """Return a function that is compiled at its first call and cached on disk.

    The cache lies beside the source or in the user's cache folder; if neither is writable, each process compiles again.
    It is invalidated only by changes of the function's own file, so all functions that it calls must be in that file.
    """
    try:
        return cast(F, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return cast(F, numba.njit(**options)(function))


def compiled_from(functions: Iterable[Callable[..., Any]], entries: Iterable[F]) -> list[F]:
    """Return compiled versions of `entries`, which are some of a file's `functions`; these stay usable uncompiled.

    The compiled functions may read and write arrays but not create them: reference counting is off, which makes small
    functions that pass arrays to each other five times as fast. They release the GIL.
    """
    for function in functions:
        register_jitable(_nrt=False)(function)
    return [compiled(entry, nogil=True, _nrt=False) for entry in entries]
