"""Reading files: regular ones only, and never more than a bound.

What is not a regular file may never end, or never answer. A file on a mount that does not answer holds up its reader
all the same: where an event loop runs, files are read in a thread.
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
    """Return the bytes of a regular file of at most so many.

    Raises
    ------
    OSError
        If it cannot be read, is not a regular file, or has more bytes. Its `strerror` says so.
    """
    check_regular(path, os.stat(path))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _WITHOUT_WAITING)) as file:
        check_regular(path, os.fstat(file.fileno()))  # it may have been replaced
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
    return data


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a regular file in UTF-8; see `read_file`."""
    try:
        return read_file(path, most_bytes).decode()
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "not UTF-8; save it as UTF-8", str(path)) from None


def check_regular(path: Path, found: os.stat_result) -> None:
    """Raise an error if what was found at a path is not a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))
