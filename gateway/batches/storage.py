"""Where files and batches are kept: a folder, or an object store. Its calls wait, so they are made in threads."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import orjson

log = logging.getLogger(__name__)

Document = dict[str, Any]
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the errors of a place that has no room for more."""
_CHUNK_BYTES: Final = 1 << 20
_MOST_RECORD_BYTES: Final = 1 << 20
_MOST_ASIDE: Final = 1000
_KINDS: Final = ("open", "answers", "batches", "files")
_COUNTED_S: Final = 60.0
"""Seconds after which the bytes of all are counted again: others add and remove some too."""
_LEFT_S: Final = 3600.0
"""Age from which on what was half written counts as left by a process that is gone."""
_LEASE_S: Final = 10.0
"""Seconds after which who no longer renews a lease is taken for dead."""
_SETTLE_S: Final = 0.3
"""Seconds after which it is seen which of two has taken a lease that both found free."""


class Storage:
    """Objects by path. Each is written as a whole: whoever reads it sees what was there before, or all of it.

    Examples
    --------
    >>> storage = Storage("memory://doctest")
    >>> storage.write("a/b.jsonl", [b"1", b"\\n2"])
    3
    >>> [*storage.lines("a/b.jsonl", 9)], storage.names("a"), storage.names("c"), storage.read("c")
    ([b'1', b'2'], ['b.jsonl'], [], None)
    """

    def __init__(self, url: str, most_bytes: float = math.inf) -> None:
        from fsspec.core import url_to_fs  # an extra

        self._fs, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._is_local = "file" in self._fs.protocol
        self._most_bytes = most_bytes
        self._bytes, self._counted_s = 0, -math.inf
        self._aside: set[str] = set()
        self.on_aside: Callable[[str], None] = lambda _: None  # called with the kind of each object that is set aside

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write an object, durably, and return its size in bytes; nothing is left of one that cannot be written."""
        target, size_bytes = f"{self._root}/{path}", 0
        written = f"{target}~{os.urandom(4).hex()}" if self._is_local else target
        try:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            with self._fs.open(written, "wb") as file:
                for chunk in chunks:
                    size_bytes += file.write(chunk)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
            if self._is_local:
                os.replace(written, target)
        except BaseException:
            if self._is_local:
                with contextlib.suppress(OSError):
                    os.remove(written)
            raise
        self._bytes += size_bytes
        return size_bytes

    def write_json(self, path: str, document: Document) -> None:
        """Write an object of JSON."""
        self.write(path, [orjson.dumps(document)])

    def check_room(self, more_bytes: int) -> None:
        """Raise what a full disk raises if all objects together would have more bytes than they may."""
        if math.isinf(self._most_bytes):
            return
        if time.monotonic() - self._counted_s > _COUNTED_S:
            self._bytes, self._counted_s = self._fs.du(self._root), time.monotonic()
        if self._bytes + more_bytes > self._most_bytes:
            raise OSError(errno.ENOSPC, "batches.max_total_mib is reached")

    def read(self, path: str) -> Document | None:
        """Return an object of JSON; None if there is none, or if it is something else, which is set aside."""
        try:
            self._check_regular(path)
            data = self._fs.cat_file(f"{self._root}/{path}", end=_MOST_RECORD_BYTES)
            document: Document = orjson.loads(data)
            if not isinstance(document, dict):
                raise ValueError("it is no JSON object")  # noqa: TRY004, TRY301 -- handled below
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError, PermissionError) as error:
            self.set_aside(path, error)
            return None
        return document

    def set_aside(self, path: str, error: object) -> None:
        """Log and count, once, an object that cannot be read; it is as if it were not there."""
        if path not in self._aside and len(self._aside) < _MOST_ASIDE:
            self._aside.add(path)
            log.warning("%s/%s cannot be read, and is left aside: %s", self._root, path, error)
            self.on_aside(next((kind for kind in _KINDS if f"/{kind}/" in f"/{path}"), "other"))

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, in order; nothing if there is no such folder."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        except (NotADirectoryError, PermissionError) as error:
            self.set_aside(folder, error)
            return []
        return sorted(name for path in paths if "~" not in (name := path.rstrip("/").rpartition("/")[2]))

    def remove(self, *paths: str) -> None:
        """Remove objects, and folders with all that is in them; those that are not there are gone already."""
        self._counted_s = -math.inf
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{path}", recursive=True)

    def remove_leftovers(self) -> None:
        """Remove what processes that are gone have half written: parts of objects, and contents without a record."""
        for path in self._fs.find(self._root):
            if "~" in path.rpartition("/")[2] or (path.endswith(".jsonl") and not self._fs.exists(path[:-1])):
                with contextlib.suppress(OSError):
                    if (datetime.now(UTC) - self._fs.modified(path)).total_seconds() > _LEFT_S:
                        self._fs.rm_file(path)

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of an object."""
        self._check_regular(path)
        with self._fs.open(f"{self._root}/{path}", "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def lines(self, path: str, most_bytes: int) -> Iterator[bytes]:
        """Yield the lines of an object; a longer one is cut off a byte later. One is held, and a chunk after it."""
        rest = b""
        for chunk in self.chunks(path):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line[: most_bytes + 1]
            rest = rest[: most_bytes + 1]
        if rest:
            yield rest

    def _check_regular(self, path: str) -> None:
        """Raise an error for what is no file: to open a pipe would wait for ever."""
        if self._is_local and not stat.S_ISREG(os.stat(f"{self._root}/{path}").st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is no regular file")


class Lease:
    """A lease, which one holds at a time, if clocks agree to some seconds.

    Two hold it at most for as long as one of them is held up between reading and writing it, or has not seen yet that
    it was stopped for longer than the lease lasts.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._holder = os.urandom(8).hex()  # who this is

    def hold(self) -> bool:
        """Hold the lease for longer, or take it if it is free; of two that do so at once, the last one holds it."""
        lease, now_s = self._storage.read(self._path) or {}, time.time()
        if lease.get("by") != self._holder:
            until_s = lease.get("until")
            if isinstance(until_s, int | float) and 0.0 < until_s - now_s < 2.0 * _LEASE_S:
                return False
            self._write()
            time.sleep(_SETTLE_S)
            if (self._storage.read(self._path) or {}).get("by") != self._holder:
                return False
        self._write()
        return True

    def release(self) -> None:
        """Release the lease, if it is held."""
        if (self._storage.read(self._path) or {}).get("by") == self._holder:
            self._storage.remove(self._path)

    def _write(self) -> None:
        self._storage.write_json(self._path, {"by": self._holder, "until": time.time() + _LEASE_S})
