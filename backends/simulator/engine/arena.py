"""Storage for many short rows of different lengths in one array."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

I = TypeVar("I", np.int16, np.int64)  # noqa: E741


class Arena(Generic[I]):
    """Allocator of pieces of `data`, in lengths that are powers of two; freed pieces are reused.

    A longer array replaces `data` when it is full, so do not keep a reference to it.

    Examples
    --------
    >>> arena = Arena(np.int64)
    >>> start = arena.put([1, 2], [3])
    >>> arena.data[start : start + 3]
    array([1, 2, 3])
    >>> arena.give_back(start, 3)
    >>> arena.put([4, 5, 6]) == start
    True
    """

    def __init__(self, dtype: type[I]) -> None:
        self.data: npt.NDArray[I] = np.zeros(1, dtype)
        self._top = 0
        self._free: dict[int, list[int]] = {}

    def put(self, *rows: npt.ArrayLike) -> int:
        """Store rows one after another and return the index of the first value."""
        values = np.concatenate(rows, dtype=self.data.dtype, casting="same_kind")
        size = _size(len(values))
        free = self._free.get(size)
        if free:
            start = free.pop()
        else:
            start, self._top = self._top, self._top + size
            if self._top > len(self.data):
                longer = np.zeros(max(self._top, 2 * len(self.data)), self.data.dtype)
                longer[: len(self.data)] = self.data
                self.data = longer
        self.data[start : start + len(values)] = values
        return start

    def give_back(self, start: int, length: int) -> None:
        """Free the rows that start at `start`, `length` values in all."""
        self._free.setdefault(_size(length), []).append(start)


def _size(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()
