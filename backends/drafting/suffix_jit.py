"""Choice between the interpreted functions of suffix decoding and the compiled ones, which `load` activates.

Both give the same results, so the change may happen between any two requests. `python -m backends.drafting.suffix_jit`
compiles the functions and caches the result on disk, where `load` finds it in other processes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np

from backends.drafting import suffix_kernel as kernel
from backends.drafting.suffix_kernel import Numbers, Tree


class Rules(NamedTuple):
    """The entry functions of `suffix_kernel`, and the conversion of a tree for them."""

    compiled: bool
    view: Callable[[Tree], Tree]
    replay: Callable[..., int]
    forget_oldest: Callable[[Tree, int], None]
    forget_newest: Callable[[Tree], None]
    rebase: Callable[[Tree], None]
    rehash: Callable[[Numbers, Numbers, Tree], None]


def _as_arrays(tree: Tree) -> Tree:
    return Tree(
        *(cast(Numbers, np.frombuffer(cast("array[int]", each), cast("array[int]", each).typecode)) for each in tree)
    )


_NAMES = Rules._fields[2:]
_rules = Rules(False, lambda tree: tree, *(getattr(kernel, name) for name in _NAMES))


def rules() -> Rules:
    """Return the current functions."""
    return _rules


def can_compile() -> bool:
    """Return whether numba is installed, which is part of the extra `lab`."""
    return find_spec("numba") is not None


def load() -> None:
    """Switch this process to the compiled functions, if numba is installed.

    Takes 0.5 s if they are cached on disk, otherwise about 10 s to compile them.
    """
    global _rules  # noqa: PLW0603 -- the choice is per process
    if _rules.compiled or not can_compile():
        return
    from backends.drafting.jit import compiled_from  # imports numba

    functions = [each for each in vars(kernel).values() if isinstance(each, FunctionType)]
    compiled_rules = Rules(True, _as_arrays, *compiled_from(functions, [getattr(kernel, name) for name in _NAMES]))
    _call_all(compiled_rules)
    _rules = compiled_rules


def _call_all(chosen: Rules) -> None:
    """Call each function once, which compiles it."""
    from backends.drafting.suffix_tree import SuffixTree

    local, shared, larger = (SuffixTree(2) for _ in range(3))
    steps = np.ones(2, np.int32), np.zeros(2, np.int32)
    text: Any = np.array([1, 2, 3], np.int32)
    tree = chosen.view(shared.arrays)
    chosen.replay(chosen.view(local.arrays), tree, text, 1, 0, 2, 8, 1.0, 0.1, True, *steps)
    chosen.rehash(tree.keys, tree.cells_by_key, chosen.view(larger.arrays))
    chosen.forget_newest(tree)
    chosen.forget_oldest(tree, 0)
    chosen.rebase(tree)


if __name__ == "__main__":
    os.nice(10)  # it runs in the background
    import_module("backends.drafting.suffix_jit").load()  # not this module, whose name is `__main__`
