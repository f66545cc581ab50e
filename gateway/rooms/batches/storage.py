"""The folder in which files and batches are stored. Its calls wait for the disk, so they run in threads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import orjson

from backends.files.regular import check_regular

log = logging.getLogger(__name__)

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk."""
_BROKEN: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EACCES, errno.ELOOP})
"""Error numbers of a path that is not what it should be; others concern the disk, and may pass."""
_MOST_RECORD_BYTES: Final = 1 << 20
_MOST_ASIDE: Final = 1000
_KINDS: Final = frozenset({"batches", "files", "open"})
_COUNTED_S: Final = 60.0
"""Seconds after which all bytes are recounted: other processes add and remove some too."""
_LEFT_S: Final = 3600.0
"""Age in seconds from which a half-written file counts as left by a process that is gone."""

T = TypeVar("T")


class Storage:
    """Objects by path. Writes are atomic: a reader sees the old object or the whole new one.

    The first line of an object is its record, in JSON; the content of a file follows.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> storage = Storage(Path(folder.name))
    >>> storage.write("a/b", {"name": "one"}, [b"1", b"\\n2"])
    >>> storage.read("a/b", dict), [*storage.lines("a/b", 9)]
    ({'name': 'one'}, [b'1', b'2'])
    >>> storage.names("a"), storage.names("c"), storage.read("c", dict)
    (['b'], [], None)
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path, most_bytes: float = math.inf, on_aside: Callable[[str], object] = bool) -> None:
        self._root = folder
        self._most_bytes = most_bytes
        self._bytes, self._counted_s = 0, -math.inf
        self._lock: BinaryIO | None = None
        self._aside: set[str] = set()
        self._on_aside = on_aside  # called with the kind of each object that is set aside

    def hold(self) -> bool:
        """Take the lock of the folder, which the kernel releases when the process exits; return whether it is held."""
        path = self._root / "lock"
        if self._lock is not None and not (path.exists() and os.path.samefile(path, self._lock.fileno())):
            self.release()  # somebody has removed the file or moved the folder, so that others would lock another
        if self._lock is None:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = open(path, "ab")  # noqa: SIM115 -- until it is released
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, path: str, record: object, content: Iterable[bytes | memoryview] = ()) -> None:
        """Write an object durably; a failed write leaves nothing behind."""
        target = self._root / path
        half = target.with_name(f"{target.name}~{os.urandom(4).hex()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(half, "xb", opener=_private) as file:
                for chunk in (orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE), *content):
                    self._bytes += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(half)
            raise

    def append(self, path: str, data: bytes) -> None:
        """Append durably to an object that nobody else appends to; a failure may leave part of the data."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab", opener=_private) as file:
            self._bytes += file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def check_room(self, more_bytes: int = 0) -> None:
        """Raise the error of a full disk if all objects together would exceed their limit."""
        if time.monotonic() - self._counted_s > _COUNTED_S:
            self._bytes, self._counted_s = sum(self._sizes()), time.monotonic()
        if self._bytes + more_bytes > self._most_bytes:
            raise OSError(errno.ENOSPC, "batches.max_total_mib is reached")

    def _sizes(self) -> Iterator[int]:
        """Yield the size of each object; remove old half-written files."""
        for folder, _, names in os.walk(self._root):
            for path in (f"{folder}/{name}" for name in names):
                with contextlib.suppress(OSError):
                    found = os.lstat(path)
                    if "~" in path.rpartition("/")[2] and time.time() - found.st_mtime > _LEFT_S:
                        os.remove(path)
                    else:
                        yield found.st_size

    def read(self, path: str, kind: Callable[..., T]) -> T | None:
        """Return the record of an object; None if there is none, or it is invalid and therefore set aside."""
        try:
            with self._opened(path) as file:
                fields: dict[str, Any] = orjson.loads(file.readline(_MOST_RECORD_BYTES))
                return kind(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError) as error:
            self.set_aside(path, error)
            return None

    def set_aside(self, path: str, error: object) -> None:
        """Log and count, once, an object that cannot be read and is ignored; raise an error of the disk."""
        if isinstance(error, OSError) and error.errno not in _BROKEN:
            raise error
        if path not in self._aside and len(self._aside) < _MOST_ASIDE:
            self._aside.add(path)
            log.warning("%s/%s cannot be read, and is left aside: %s", self._root, path, error)
            self._on_aside(next((part for part in path.split("/") if part in _KINDS), "other"))

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if there is no such folder."""
        try:
            return sorted(name for name in os.listdir(self._root / folder) if "~" not in name)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.set_aside(folder, error)
            return []

    def remove(self, *paths: str) -> None:
        """Remove objects; ignore missing ones."""
        for path in paths:
            (self._root / path).unlink(missing_ok=True)
            self._counted_s = -math.inf

    def content(self, path: str) -> Iterator[bytes]:
        """Yield the content after a record."""
        with self._opened(path) as file:
            file.readline()
            while part := file.read(1 << 20):
                yield part

    def lines(self, path: str, most_bytes: int) -> Iterator[bytes]:
        """Yield the lines after a record; one that is too long is cut off one byte above the limit."""
        is_cut = False
        try:
            opened = self._opened(path)
        except OSError as error:
            self.set_aside(path, error)
            raise FileNotFoundError(path) from error
        with opened as file:
            file.readline()
            while part := file.readline(most_bytes + 1):
                if not is_cut:
                    yield part.rstrip(b"\n")
                is_cut = not part.endswith(b"\n")

    def _opened(self, path: str) -> BinaryIO:
        check_regular(self._root / path, os.stat(self._root / path))  # opening a pipe would block forever
        return open(self._root / path, "rb")


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read, since it has users' texts."""
    return os.open(path, flags, 0o600)
