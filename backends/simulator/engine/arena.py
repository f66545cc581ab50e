"""Room in one array for many short rows of unlike lengths, as they come and go."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

I = TypeVar("I", np.int16, np.int64)  # noqa: E741


class Arena(Generic[I]):
    """Hands out pieces of `data` in lengths of powers of two; pieces given back are used again.

    `data` is replaced by a longer array when it is full: do not keep it.
    """

    def __init__(self, dtype: type[I]) -> None:
        self.data: npt.NDArray[I] = np.zeros(1, dtype)
        self._top = 0
        self._free: dict[int, list[int]] = {}

    def put(self, *rows: npt.ArrayLike) -> int:
        """Store rows one behind the other and return where they begin."""
        values = np.concatenate(rows, dtype=self.data.dtype, casting="same_kind")
        size = _size(len(values))
        free = self._free.get(size)
        if free:
            at = free.pop()
        else:
            at, self._top = self._top, self._top + size
            if self._top > len(self.data):
                longer = np.zeros(max(self._top, 2 * len(self.data)), self.data.dtype)
                longer[: len(self.data)] = self.data
                self.data = longer
        self.data[at : at + len(values)] = values
        return at

    def give_back(self, at: int, length: int) -> None:
        """Forget the rows at `at`, `length` values in all."""
        self._free.setdefault(_size(length), []).append(at)


def _size(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()
