"""Bounded reads of regular files.

Reading anything else may never end, or never return. Even a regular file blocks its reader if its mount does not
answer: next to an event loop, read files in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

_WITHOUT_WAITING: Final = os.O_NONBLOCK | os.O_NOCTTY
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`.

    Raises
    ------
    OSError
        If it cannot be read, is not a regular file, or is larger; `strerror` says which.
    """
    check_regular(path, os.stat(path))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _WITHOUT_WAITING)) as file:
        check_regular(path, os.fstat(file.fileno()))  # it may have been replaced
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
    return data


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a regular UTF-8 file; see `read_file`."""
    try:
        return read_file(path, most_bytes).decode()
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "not UTF-8; save it as UTF-8", str(path)) from None


def check_regular(path: Path, found: os.stat_result) -> None:
    """Raise `OSError` if the object at a path is not a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))
