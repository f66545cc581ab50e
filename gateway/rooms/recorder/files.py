"""The files of a recorder: complete frames, rotation by size and age, removal of old files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import zstandard

from backends.files.regular import check_regular
from gateway.rooms.recorder.settings import RecorderSettings

logger = logging.getLogger(__name__)

PREFIX = "requests-"
_LEVEL = 1
"""zstd level whose tables fit the L1 cache; level 3 takes 50% longer for 10% smaller files."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""Error numbers of a file system without locks."""


class TraceFiles:
    """Writes lines to rotated files.

    A file is named after its start time and the process that writes it. It is locked (`flock`) while it is written, so
    that no other process with the same folder removes it. Each `write` appends an independent frame, so the file stays
    readable however the process ends. If another program removes or renames it, a new one is started.
    """

    def __init__(self, settings: RecorderSettings, now: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._now = now  # returns seconds since 1970
        self._is_compressed = settings.compression == "zstd"
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._descriptor: int | None = None
        self._path = settings.path
        self._size_bytes = 0
        self._begun_at = 0.0
        self._number = 0

    def write(self, lines: bytes) -> None:
        """Append lines, all or none."""
        frame = self._compressor.compress(lines) if self._is_compressed else lines
        if self._descriptor is not None and not self._is_in_place(self._descriptor):
            logger.warning("recorder: %s was removed or renamed while it was written; a new file is begun", self._path)
            self.close()
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        try:
            rest = memoryview(frame)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # removes the incomplete frame
                os.ftruncate(self._descriptor, self._size_bytes)
                if not self._size_bytes:  # an attempt must not leave an empty file
                    self._path.unlink()
            self.close()
            raise
        if os.fstat(self._descriptor).st_nlink == 0:
            self.close()
            raise OSError(errno.ENOENT, "the file was removed while it was written")
        self._size_bytes += len(frame)
        if self._size_bytes >= self._settings.rotate_mib * 2**20:
            self.close()

    def maintenance(self) -> None:
        """Close the file if it is old enough, and remove expired ones, even while nothing is written."""
        if not 0.0 <= self._now() - self._begun_at < self._settings.rotate_s:  # negative if the clock was set back
            self._begun_at = self._now()
            self.close()
            self._remove_old()

    def close(self) -> None:
        """Close the file; the next write starts a new one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except OSError as error:
            return error.errno not in {errno.ENOENT, errno.ENOTDIR}

    def _open(self) -> None:
        folder = self._settings.path
        folder.mkdir(parents=True, exist_ok=True)
        self._begun_at = self._now()
        started_at = datetime.fromtimestamp(self._begun_at, UTC).strftime("%Y%m%dT%H%M%S.%f")
        self._number += 1
        name = f"{PREFIX}{started_at}Z-{os.getpid()}-{self._number}.jsonl" + (".zst" if self._is_compressed else "")
        # Readable only by its owner: it may contain users' texts.
        path = folder / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptor, self._path, self._size_bytes = descriptor, path, 0
        self._remove_old()

    def _remove_old(self) -> None:
        keep_s, keep_mib = self._settings.keep_s, self._settings.keep_mib
        if keep_s is None and keep_mib is None:
            return
        files = []
        for path in self._settings.path.glob(f"{PREFIX}*.jsonl*"):
            with contextlib.suppress(OSError):  # removed by another worker, or not a recorder's file
                status = path.stat()
                check_regular(path, status)
                files.append((status.st_mtime, status.st_size, path))
        size_bytes = sum(size for _, size, _ in files)
        for changed_at, size, path in sorted(files):
            too_old = keep_s is not None and self._now() - changed_at > keep_s
            too_many = keep_mib is not None and size_bytes > keep_mib * 2**20
            is_own = self._descriptor is not None and path == self._path
            if (too_old or too_many) and not is_own and _remove_unless_locked(path):
                size_bytes -= size


def _remove_unless_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # else its age and the size of all decide
                raise
        finally:
            os.close(descriptor)
        path.unlink()
    except OSError:
        return False
    return True
