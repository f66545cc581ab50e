"""Compiling loops with numba: where it is imported, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numba
from numba.extending import register_jitable

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, **options: Any) -> F:
    """Compile a function at its first call and keep the result on disk, beside the source or in the user's cache.

    What is kept is told apart by the function's own file only: what it calls must stand in that file too. Where
    neither folder can be written it is compiled anew in each process.
    """
    try:
        return cast(F, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return cast(F, numba.njit(**options)(function))


def compiled_from(functions: Iterable[Callable[..., Any]], entries: Iterable[F]) -> list[F]:
    """Compile `entries`, some of a file's `functions`, which stay as they are for who calls them uncompiled.

    They may read and write the arrays they are given, but make none: references are not counted, which makes small
    functions that pass arrays to each other five times as fast. Other threads run meanwhile.
    """
    for function in functions:
        register_jitable(_nrt=False)(function)
    return [compiled(entry, nogil=True, _nrt=False) for entry in entries]
