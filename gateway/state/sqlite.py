"""A store in an SQLite file, for the workers of one gateway or several gateways on one host."""

from __future__ import annotations

import contextlib
import operator
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from gateway.state.sqlite_file import is_corrupt, open_file, primary_code, set_aside
from gateway.state.store import (
    VERSIONS_KEPT,
    Conflict,
    Content,
    Document,
    Push,
    Receipt,
    StateError,
    read_key,
    read_sums,
    write_key,
    write_sums,
)

_KINDS = {
    sqlite3.SQLITE_BUSY: "timeout",
    sqlite3.SQLITE_LOCKED: "timeout",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_PERM: "unwritable",
    sqlite3.SQLITE_READONLY: "unwritable",
    sqlite3.SQLITE_CANTOPEN: "unwritable",
    sqlite3.SQLITE_IOERR: "unwritable",
}


class SqliteStore:
    """A `Store` in an SQLite file; nothing is opened before the first call.

    Parameters
    ----------
    path
        The file, on a local disk. A corrupt file is renamed and replaced by a new one.
    """

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def push(self, model: str, writer: str, pushes: Sequence[Push]) -> list[Receipt]:
        """See `Store.push`."""
        with self._transaction("IMMEDIATE") as connection:
            return [_push(connection, model, writer, push) for push in pushes]

    def stamps(self, model: str) -> dict[str, str]:
        """See `Store.stamps`."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT page, generation, version FROM pages WHERE model = ?", (model,))
            return {page: f"{generation} {version}" for page, generation, version in rows}

    def read(self, model: str, writer: str, pages: Sequence[str]) -> dict[str, Content]:
        """See `Store.read`."""
        contents: dict[str, Content] = {}
        with self._transaction() as connection:
            for page in pages:
                if generation := _generation(connection, model, page):
                    buckets = connection.execute(
                        "SELECT key, sums FROM cells WHERE model = ? AND page = ?", (model, page)
                    )
                    rows = {read_key(key): read_sums(sums) for key, sums in buckets}
                    contents[page] = Content(generation, _last_batch(connection, model, page, writer), rows)
        return contents

    def versions(self) -> dict[str, int]:
        """See `Store.versions`."""
        with self._transaction() as connection:
            return dict(connection.execute("SELECT name, max(version) FROM documents GROUP BY name"))

    def history(self, name: str) -> list[Document]:
        """See `Store.history`."""
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT name, version, text, written_s FROM documents WHERE name = ? ORDER BY version", (name,)
            )
            return [Document(*row) for row in rows]

    def put(self, document: Document) -> None:
        """See `Store.put`."""
        with self._transaction("IMMEDIATE") as connection:
            version = _version(connection, document.name)
            if version != document.version - 1:
                raise Conflict(document.name, version)
            _write(connection, document)

    def restore(self, documents: Iterable[Document]) -> None:
        """See `Store.restore`."""
        with self._transaction("IMMEDIATE") as connection:
            for document in documents:
                if document.version > _version(connection, document.name):
                    _write(connection, document)

    def close(self) -> None:
        """See `Store.close`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _transaction(self, kind: str = "DEFERRED") -> Iterator[sqlite3.Connection]:
        try:
            connection = self._opened()
            connection.execute(f"BEGIN {kind}")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:  # some errors roll back by themselves
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self.close()
            if is_corrupt(error):
                self._set_aside()
            raise StateError(_KINDS.get(primary_code(error), "refused"), f"{self._path}: {error}") from error
        except OSError as error:
            self.close()
            raise StateError("unwritable", f"{self._path}: {error.strerror}") from error

    def _opened(self) -> sqlite3.Connection:
        """Return the connection, reopened if the file was deleted or replaced."""
        if self._connection is not None:
            try:
                if self._path.stat().st_ino == self._inode:
                    return self._connection
            except FileNotFoundError:
                pass
            self.close()
        self._connection = open_file(self._path)
        self._inode = self._path.stat().st_ino
        return self._connection

    def _set_aside(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # the caller raises the original error; the next call tries again
            set_aside(self._path)


def _push(connection: sqlite3.Connection, model: str, writer: str, push: Push) -> Receipt:
    page_key = (model, push.page)
    generation = _generation(connection, *page_key)
    last = _last_batch(connection, *page_key, writer)
    if push.generation and push.generation != generation:
        return Receipt(generation, 0)
    if generation and last >= push.batch:  # a repeated push, whose receipt was lost
        return Receipt(generation, last)
    if last < push.batch - 1:  # the file was reset to an older state, so no writer knows its share of this page
        _forget(connection, [page_key])
        return Receipt("", 0)
    if not generation:
        generation = uuid4().hex
        expired = connection.execute("SELECT model, page FROM pages WHERE end_s <= ?", (time.time(),)).fetchall()
        _forget(connection, expired)
        connection.execute("INSERT INTO pages VALUES (?, ?, ?, 0, ?)", (*page_key, generation, push.end_s))
    for key, sums in push.rows.items():
        bucket = (*page_key, write_key(key))
        total = sums
        before = connection.execute(
            "SELECT sums FROM cells WHERE model = ? AND page = ? AND key = ?", bucket
        ).fetchone()
        if before is not None:
            total = tuple(map(operator.add, sums, read_sums(before[0])))
        connection.execute("REPLACE INTO cells VALUES (?, ?, ?, ?)", (*bucket, write_sums(total)))
    connection.execute("UPDATE pages SET version = version + 1 WHERE model = ? AND page = ?", page_key)
    connection.execute("REPLACE INTO batches VALUES (?, ?, ?, ?)", (*page_key, writer, push.batch))
    return Receipt(generation, push.batch)


def _generation(connection: sqlite3.Connection, model: str, page: str) -> str:
    row = connection.execute("SELECT generation FROM pages WHERE model = ? AND page = ?", (model, page)).fetchone()
    return "" if row is None else str(row[0])


def _last_batch(connection: sqlite3.Connection, model: str, page: str, writer: str) -> int:
    row = connection.execute(
        "SELECT batch FROM batches WHERE model = ? AND page = ? AND writer = ?", (model, page, writer)
    ).fetchone()
    return 0 if row is None else int(row[0])


def _forget(connection: sqlite3.Connection, pages: Iterable[tuple[str, str]]) -> None:
    page_keys = list(pages)
    for table in ("cells", "batches", "pages"):
        connection.executemany(f"DELETE FROM {table} WHERE model = ? AND page = ?", page_keys)  # noqa: S608


def _version(connection: sqlite3.Connection, name: str) -> int:
    (version,) = connection.execute("SELECT max(version) FROM documents WHERE name = ?", (name,)).fetchone()
    return version or 0


def _write(connection: sqlite3.Connection, document: Document) -> None:
    row = (document.name, document.version, document.text, document.written_s)
    connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?)", row)
    oldest = document.version - VERSIONS_KEPT
    connection.execute("DELETE FROM documents WHERE name = ? AND version <= ?", (document.name, oldest))
