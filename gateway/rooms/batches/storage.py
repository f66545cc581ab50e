"""Where files and batches are kept: a folder. Its calls wait for the disk, so they are made in threads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from backends.files.regular import check_regular, read_file

log = logging.getLogger(__name__)

Document = dict[str, Any]
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the errors of a place that has no room for more."""
_BROKEN: Final = frozenset({errno.EFBIG, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EACCES, errno.ELOOP})
"""Those of what is something else than it should be; others are of the disk, and may pass."""
_MOST_RECORD_BYTES: Final = 1 << 20
_MOST_ASIDE: Final = 1000
_KINDS: Final = ("open", "answers", "batches", "files")
_COUNTED_S: Final = 60.0
"""Seconds after which the bytes of all are counted again: other processes add and remove some too."""
_LEFT_S: Final = 3600.0
"""Age from which on what was half written counts as left by a process that is gone."""


class Storage:
    """Objects by path. Each is written as a whole: whoever reads it sees what was there before, or all of it.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> storage = Storage(Path(mkdtemp()))
    >>> storage.write("a/b.jsonl", [b"1", b"\\n2"])
    3
    >>> [*storage.lines("a/b.jsonl", 9)], storage.names("a"), storage.names("c"), storage.read("c")
    ([b'1', b'2'], ['b.jsonl'], [], None)
    """

    def __init__(self, folder: Path, most_bytes: float = math.inf) -> None:
        self._root = folder
        self._most_bytes = most_bytes
        self._bytes, self._counted_s = 0, -math.inf
        self._lock: BinaryIO | None = None
        self._aside: set[str] = set()
        self.on_aside: Callable[[str], None] = lambda _: None  # called with the kind of each object that is set aside

    def hold(self) -> bool:
        """Return whether this process has the lock of the folder, which the kernel releases when the process ends."""
        if self._lock is None:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._root / "lock", "ab")  # noqa: SIM115 -- until it is released
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

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write an object, durably, and return its size in bytes; nothing is left of one that cannot be written."""
        target, size_bytes = self._root / path, 0
        half = target.with_name(f"{target.name}~{os.urandom(4).hex()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(half, "xb") as file:
                for chunk in chunks:
                    size_bytes += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(half)
            raise
        self._bytes += size_bytes
        return size_bytes

    def write_json(self, path: str, document: Document) -> None:
        """Write an object of JSON."""
        self.write(path, [orjson.dumps(document)])

    def append(self, path: str, data: bytes) -> None:
        """Append to an object that nobody else appends to, durably: all of it or, if that fails, nothing."""
        target, rest = self._root / path, memoryview(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab", buffering=0) as file:
            size_bytes = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fdatasync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(size_bytes)
                raise
        self._bytes += len(data)

    def check_room(self, more_bytes: int) -> None:
        """Raise what a full disk raises if all objects together would have more bytes than they may."""
        if time.monotonic() - self._counted_s > _COUNTED_S:
            self._bytes, self._counted_s = sum(self._sizes()), time.monotonic()
        if self._bytes + more_bytes > self._most_bytes:
            raise OSError(errno.ENOSPC, "batches.max_total_mib is reached")

    def _sizes(self) -> Iterator[int]:
        """Yield the bytes of each object; what was half written long ago is removed: parts, contents without record."""
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = f"{folder}/{name}"
                with contextlib.suppress(OSError):
                    found = os.lstat(path)
                    is_half = "~" in name or (name.endswith(".jsonl") and not os.path.exists(path[:-1]))
                    if is_half and time.time() - found.st_mtime > _LEFT_S:
                        os.remove(path)
                    else:
                        yield found.st_size

    def read(self, path: str) -> Document | None:
        """Return an object of JSON; None if there is none, or if it is something else, which is set aside."""
        try:
            document = orjson.loads(read_file(self._root / path, _MOST_RECORD_BYTES))
            if isinstance(document, dict):
                return document
            self.set_aside(path, "it is no JSON object")
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            self.set_aside(path, error)
        return None

    def set_aside(self, path: str, error: object) -> None:
        """Log and count, once, an object that cannot be read; it is as if it were not there."""
        if isinstance(error, OSError) and error.errno not in _BROKEN:
            raise error
        if path not in self._aside and len(self._aside) < _MOST_ASIDE:
            self._aside.add(path)
            log.warning("%s/%s cannot be read, and is left aside: %s", self._root, path, error)
            self.on_aside(next((kind for kind in _KINDS if f"/{kind}/" in f"/{path}"), "other"))

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, in order; nothing if there is no such folder."""
        try:
            return sorted(name for name in os.listdir(self._root / folder) if "~" not in name)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.set_aside(folder, error)
            return []

    def remove(self, *paths: str) -> None:
        """Remove objects, and folders with all that is in them; those that are not there are gone already."""
        self._counted_s = -math.inf
        for path in map(self._root.joinpath, paths):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of an object."""
        return self._parts(path, lambda file: file.read(1 << 20))

    def lines(self, path: str, most_bytes: int) -> Iterator[bytes]:
        """Yield the lines of an object; a longer one is cut off a byte later."""
        is_cut = False
        for part in self._parts(path, lambda file: file.readline(most_bytes + 1)):
            if not is_cut:
                yield part.rstrip(b"\n")
            is_cut = not part.endswith(b"\n")

    def _parts(self, path: str, read: Callable[[BinaryIO], bytes]) -> Iterator[bytes]:
        check_regular(self._root / path, os.stat(self._root / path))  # to open a pipe would wait for ever
        with open(self._root / path, "rb") as file:
            while part := read(file):
                yield part
