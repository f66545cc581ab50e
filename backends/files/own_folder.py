"""Folders that this run makes for itself, in a place where other users may make them too."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

_WRITE_OF_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def make_own(folder: Path) -> bool:
    """Make a folder for this user alone, unless it is there; return whether it was made.

    Until the process ends, it is locked (`flock`): who removes old files from /tmp leaves it alone.

    Raises
    ------
    OSError
        If it cannot be made, or another user has made it or may write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        check_own(folder)
        return False
    fcntl.flock(os.open(folder, os.O_DIRECTORY), fcntl.LOCK_SH)
    return True


def check_own(folder: Path) -> None:
    """Raise `OSError` if another user has made a folder, or may write there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _WRITE_OF_OTHERS:
        raise PermissionError(errno.EACCES, "another user made it or may write there; remove it", str(folder))
