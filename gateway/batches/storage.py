"""Where files and batches are kept: a folder, or an object store. Its calls wait, so they are made in threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import orjson

Document = dict[str, Any]
_CHUNK_BYTES: Final = 1 << 20
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
    >>> [*storage.lines("a/b.jsonl")], storage.names("a"), storage.names("c"), storage.read("c")
    ([b'1', b'2'], ['b.jsonl'], [], None)
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # an extra

        self._fs, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._is_local = "file" in self._fs.protocol

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write an object, durably, and return its size in bytes."""
        target, size_bytes = f"{self._root}/{path}", 0
        written = f"{target}~{os.urandom(4).hex()}" if self._is_local else target
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        with self._fs.open(written, "wb") as file:
            for chunk in chunks:
                size_bytes += file.write(chunk)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        if self._is_local:
            os.replace(written, target)
        return size_bytes

    def write_json(self, path: str, document: Document) -> None:
        """Write an object of JSON."""
        self.write(path, [orjson.dumps(document)])

    def read(self, path: str) -> Document | None:
        """Return an object of JSON; None if there is none."""
        try:
            document: Document = orjson.loads(self._fs.cat_file(f"{self._root}/{path}"))
        except FileNotFoundError:
            return None
        return document

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, in order; nothing if there is no such folder."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(name for path in paths if "~" not in (name := path.rstrip("/").rpartition("/")[2]))

    def remove(self, *paths: str) -> None:
        """Remove objects, and folders with all that is in them; those that are not there are gone already."""
        for path in paths:
            try:
                self._fs.rm(f"{self._root}/{path}", recursive=True)
            except FileNotFoundError:
                continue

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of an object."""
        with self._fs.open(f"{self._root}/{path}", "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of an object, of which one is held at a time, with a chunk of those that follow."""
        rest = b""
        for chunk in self.chunks(path):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
        if rest:
            yield rest


class Lease:
    """A lease, which one holds at a time, if clocks agree to some seconds.

    Two hold it at most for as long as one of them is held up between reading and writing it, or has not seen yet that
    it was stopped for longer than the lease lasts.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self.holder = os.urandom(8).hex()  # who this is

    def take(self) -> bool:
        """Take the lease if it is free; of two that do so at once, the last one holds it."""
        lease = self._storage.read(self._path)
        if lease is not None and lease["until"] > time.time():
            return False
        self._write()
        time.sleep(_SETTLE_S)
        return self.renew()

    def renew(self) -> bool:
        """Hold the lease for longer; return False if it is another's."""
        if is_held := (self._storage.read(self._path) or {}).get("by") == self.holder:
            self._write()
        return is_held

    def release(self) -> None:
        """Release the lease."""
        if self.renew():
            self._storage.remove(self._path)

    def _write(self) -> None:
        self._storage.write_json(self._path, {"by": self.holder, "until": time.time() + _LEASE_S})
