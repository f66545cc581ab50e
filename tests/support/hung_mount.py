"""A mount that never answers, as one of a file server that has gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hung_mount(folder: Path) -> Iterator[Path]:
    """Mount a file system whose server reads no request, until the end; skip where that is not allowed."""
    folder.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"hung", bytes(folder), b"fuse", 0, options):
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield folder
        finally:
            _libc.umount2(bytes(folder), _DETACH)
    finally:
        os.close(server)  # what waits gets an error
