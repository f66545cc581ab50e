"""The files of a recorder: whole frames, a new file when one is large or old enough, the oldest ones removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import zstandard

from gateway.settings import RecorderSettings

PREFIX = "requests-"
_LEVEL, _WINDOW_LOG = 1, 18
"""Of zstd: its tables and its window fit a core's own cache, beside what the event loop has there."""


class TraceFiles:
    """Writes lines to one file after the other.

    A file is named for the moment it began and the process that writes it, and is locked (`flock`) while it is written,
    so that no other process that shares the folder removes it. Lines are packed as they are added, while they are in
    the cache; every `write` appends all that was added as one frame that can be read by itself: whatever ends the
    process, what was written before stays readable.

    Parameters
    ----------
    now
        Seconds since 1970.
    """

    def __init__(self, settings: RecorderSettings, now: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._now = now
        self._packed = settings.compression == "zstd"
        parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG, write_checksum=True)
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._packing: zstandard.ZstdCompressionObj | None = None
        self._frame: list[bytes] = []  # of the frame to be written, what there is
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._begun_at = 0.0
        self._number = 0

    def add(self, lines: bytes) -> None:
        """Add lines to what is to be written."""
        if not self._packed:
            self._frame.append(lines)
            return
        if self._packing is None:
            self._packing = self._compressor.compressobj()
        self._frame.append(self._packing.compress(lines))

    def write(self) -> int:
        """Append what was added to a file, whole or not at all.

        Returns
        -------
        int
            Bytes that it takes there.

        Raises
        ------
        OSError
            If the folder or the disk does not take it; it is lost. The next call tries with a new file.
        """
        if self._packing is not None:
            self._frame.append(self._packing.flush())
            self._packing = None
        frame = b"".join(self._frame)
        self._frame.clear()
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        try:
            rest = memoryview(frame)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # what there is of the frame is no use to anybody
                os.ftruncate(self._descriptor, self._size_bytes)
            self.close()
            raise
        self._size_bytes += len(frame)
        if self._size_bytes >= self._settings.rotate_mib * 2**20:
            self.close()
        return len(frame)

    def upkeep(self) -> None:
        """Close a file that is old enough."""
        if self._descriptor is not None and self._now() - self._begun_at >= self._settings.rotate_s:
            self.close()

    def close(self) -> None:
        """Close the file; the next write begins another."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        folder = self._settings.path
        folder.mkdir(parents=True, exist_ok=True)
        self._begun_at = self._now()
        moment = datetime.fromtimestamp(self._begun_at, UTC).strftime("%Y%m%dT%H%M%S.%f")
        self._number += 1
        name = f"{PREFIX}{moment}Z-{os.getpid()}-{self._number}.jsonl" + (".zst" if self._packed else "")
        # For its owner alone: it may hold what people wrote.
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody else can take one either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptor, self._size_bytes = descriptor, 0
        self._remove_old()

    def _remove_old(self) -> None:
        keep_s, keep_mib = self._settings.keep_s, self._settings.keep_mib
        if keep_s is None and keep_mib is None:
            return
        files = []
        for path in self._settings.path.glob(f"{PREFIX}*.jsonl*"):
            with contextlib.suppress(OSError):  # another worker has just removed it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        size_bytes = sum(size for _, size, _ in files)
        for changed_at, size, path in sorted(files):
            too_old = keep_s is not None and self._now() - changed_at > keep_s
            too_many = keep_mib is not None and size_bytes > keep_mib * 2**20
            if (too_old or too_many) and _remove_unless_locked(path):
                size_bytes -= size


def _remove_unless_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
