"""Compiling loops with numba: where it is imported, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function at its first call and keep the result on disk, beside the source or in the user's cache.

    What is kept is told apart by the function's own file only: what it calls must stand in that file too. Where
    neither folder can be written it is compiled anew in each process.
    """
    try:
        return cast(F, numba.njit(cache=True)(function))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return cast(F, numba.njit(function))
