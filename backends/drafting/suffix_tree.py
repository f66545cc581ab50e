"""Suffix tree of bounded depth that counts how often each run of tokens occurred."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from backends.drafting import suffix_kernel as kernel
from backends.drafting.suffix_jit import rules
from backends.drafting.suffix_kernel import NONE, Tree

Ints = npt.NDArray[np.int32]


class SuffixTree:
    """The counts of all runs of up to `depth` tokens in a number of sequences.

    Counts, and the order of equally frequent continuations, equal those of arctic-inference 0.1.1
    (`csrc/suffix_decoding/suffix_tree.cc`). Only the newest sequence can grow. This class allocates the memory, and
    enlarges it as needed; the functions of `suffix_kernel` work on it.

    Parameters
    ----------
    depth
        Maximum length of a run, in tokens.
    tokens
        Initial capacity in tokens.

    Examples
    --------
    >>> tree = SuffixTree(depth=4)
    >>> tree.begin()
    >>> for token in (1, 2, 3):
    ...     tree.append(token)
    >>> tree.forget_newest()
    """

    def __init__(self, depth: int, tokens: int = 64) -> None:
        self.depth = depth
        table_size = 1 << (4 * tokens + 8 * depth).bit_length()
        cells, slots = kernel.CELL * (tokens + 4 * depth), (kernel.LABEL + depth) * (tokens // 4 + 4 * depth)
        self.arrays = Tree(
            cells=array("i", bytes(4 * cells)),
            slots=array("i", bytes(4 * slots)),
            keys=array("q", bytes(8 * table_size)),
            cells_by_key=array("i", bytes(4 * table_size)),
            buffer=array("i", bytes(4 * (tokens + 4))),
            active=array("i", bytes(4 * depth)),
            state=array("q", bytes(8 * kernel.STATE)),
        )
        root, state = self.arrays.cells, self.arrays.state
        root[kernel.PREVIOUS] = root[kernel.FOLLOWING] = NONE
        for field in (kernel.FIRST_CHILD, kernel.LAST_CHILD, kernel.ONCE):
            self.arrays.slots[field] = NONE
        state[kernel.DEPTH] = depth
        state[kernel.CELLS], state[kernel.SLOTS] = kernel.CELL, kernel.LABEL + depth
        state[kernel.FREE_CELL] = state[kernel.FREE_SLOT] = NONE

    @property
    def held_bytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(memoryview(cast("array[int]", each)).nbytes for each in self.arrays)

    def begin(self) -> None:
        """Begin a new sequence."""
        self.make_room()
        kernel.begin(self.arrays)

    def append(self, token: int) -> None:
        """Append a token to the newest sequence."""
        self.make_room()
        kernel.append(self.arrays, token)

    def forget_oldest(self, length: int) -> None:
        """Remove the oldest sequence, which has `length` tokens; only allowed before a new one begins."""
        chosen = rules()
        chosen.forget_oldest(chosen.view(self.arrays), length)

    def forget_newest(self) -> None:
        """Remove the newest sequence."""
        chosen = rules()
        chosen.forget_newest(chosen.view(self.arrays))

    def make_room(self) -> None:
        """Make room for another token; no view of the arrays may exist."""
        state, chosen = self.arrays.state, rules()
        if 2 * state[kernel.OLDEST] > len(self.arrays.buffer):
            chosen.rebase(chosen.view(self.arrays))
        for used, sequence, spare in (
            (state[kernel.CELLS], self.arrays.cells, 2 * self.depth * kernel.CELL),
            (state[kernel.SLOTS], self.arrays.slots, 2 * self.depth * (kernel.LABEL + self.depth)),
            (state[kernel.TOKENS], self.arrays.buffer, 2),
        ):
            if used + spare > len(sequence):
                _double(sequence)
        table_size = len(self.arrays.keys)
        if 2 * (state[kernel.ENTRIES] + 2 * self.depth) > table_size:
            larger = self.arrays._replace(
                keys=array("q", bytes(16 * table_size)), cells_by_key=array("i", bytes(8 * table_size))
            )
            old, new = chosen.view(self.arrays), chosen.view(larger)
            chosen.rehash(old.keys, old.cells_by_key, new)
            self.arrays = larger


def replay(
    local: SuffixTree,
    shared: SuffixTree,
    text: Sequence[int],
    prompt_tokens: int,
    *,
    num_speculative_tokens: int,
    max_model_len: int,
    factor: float,
    min_prob: float,
    remember: bool,
    emitted: Ints,
    drafted: Ints,
) -> None:
    """Replay a text on a request's own tree and on the tree of earlier answers; see `suffix_kernel.replay`."""
    chosen, tokens = rules(), np.array(text, np.int32)
    limits: Any = (num_speculative_tokens, max_model_len, float(factor), float(min_prob), remember)
    sequence: Any = tokens if chosen.compiled else text
    index = 0
    while True:
        trees = chosen.view(local.arrays), chosen.view(shared.arrays)
        index = chosen.replay(*trees, sequence, prompt_tokens, index, *limits, emitted, drafted)
        if index == len(text):
            return
        del trees  # an array with a view cannot grow
        local.make_room()
        shared.make_room()


def _double(sequence: Any) -> None:
    sequence.frombytes(bytes(sequence.itemsize * len(sequence)))
