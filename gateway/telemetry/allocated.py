"""Files of the values that workers share, on a disk that may be full."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger(__name__)


class AllocatedValues(MmapedDict):
    """A file of values, all of whose blocks exist before it is mapped.

    `prometheus_client` maps sparse files, where a write for which the disk has no block kills the process.
    """

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._fname = filename
        self._in_memory = not self._allocate(filename, _FIRST_BYTES)
        if self._in_memory:
            Path(filename).unlink(missing_ok=True)  # an empty file cannot be read
        super().__init__(_memory(b"") if self._in_memory else filename, read_mode)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        if not self._in_memory and self._used + len(key.encode()) + _MOST_BESIDE_KEY > self._capacity:
            self._in_memory = not self._allocate(self._f.fileno(), 2 * self._capacity)
            if self._in_memory:
                self._f.close()
                self._f = open(_memory(self._m[:]), "a+b")  # noqa: SIM115 -- `close` closes it
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _allocate(self, file: str | int, size: int) -> bool:
        """Return whether a file, by its name or descriptor, has blocks for `size` bytes now; log why it has not."""
        try:
            with open(file, "ab", closefd=isinstance(file, str)) as opened:
                os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            text = "%s: %s; /metrics lacks what this worker counts there from now on, until a restart"
            logger.warning(text, self._fname, error.strerror)
            return False
        return True


def allocate_shared_values() -> None:
    """Make `prometheus_client` allocate the files of workers."""
    values.MmapedDict = AllocatedValues  # type: ignore[attr-defined]


def _memory(content: bytes) -> int:
    """Return the descriptor of a file in memory, which no other process reads."""
    descriptor = os.memfd_create("values")
    os.write(descriptor, content)
    return descriptor


_FIRST_BYTES: Final = 1 << 16
"""Size of a new file, as `prometheus_client` makes it."""
_MOST_BESIDE_KEY: Final = 32
"""Bytes that a value takes beside its key."""
