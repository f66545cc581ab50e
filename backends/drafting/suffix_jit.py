"""Which form of the rules of suffix decoding this process uses: interpreted, or compiled once `load` has run.

Both give the same, so that they may change between two requests. `python -m backends.drafting.suffix_jit`
compiles them and keeps the result on disk, where `load` finds it in other processes.
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
    """The functions of `suffix_kernel` that are called from outside, and what makes a tree ready for them."""

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
    """Return the rules to use now."""
    return _rules


def can_compile() -> bool:
    """Return whether numba is installed: the extra `lab` brings it."""
    return find_spec("numba") is not None


def load() -> None:
    """Use the compiled rules from now on, if numba is installed.

    Takes 0.5 s where they are on disk; else they are compiled first, which takes about 10 s.
    """
    global _rules  # noqa: PLW0603 -- one for the process
    if _rules.compiled or not can_compile():
        return
    from backends.drafting.jit import compiled_from  # loads the compiler

    functions = [each for each in vars(kernel).values() if isinstance(each, FunctionType)]
    made = Rules(True, _as_arrays, *compiled_from(functions, [getattr(kernel, name) for name in _NAMES]))
    _use_all(made)
    _rules = made


def _use_all(chosen: Rules) -> None:
    """Call each of the functions once: that is when they are compiled."""
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
    os.nice(10)  # behind who waits for it
    import_module("backends.drafting.suffix_jit").load()  # not this one, which is called `__main__`
