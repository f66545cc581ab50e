"""A store in an SQLite file, for the workers of one gateway or several gateways on one host."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from backends.files.regular import check_regular
from gateway.state.store import Entry, StateError

logger = logging.getLogger(__name__)

_APPLICATION_ID = 0x5350_4757  # "SPGW": marks the file as the gateway's
_FORMAT = 2
_BUSY_S = 2.0
_TABLES = """
CREATE TABLE entries (name TEXT PRIMARY KEY, stamp TEXT NOT NULL, end_s REAL NOT NULL, value BLOB NOT NULL);
CREATE INDEX stamps ON entries (name, stamp) WHERE stamp != '';
CREATE INDEX ends ON entries (end_s) WHERE end_s > 0;
"""
_ORIGINS = {True: "the one from the last time", False: "a new file"}
_KINDS = {
    sqlite3.SQLITE_BUSY: "timeout",
    sqlite3.SQLITE_LOCKED: "timeout",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
    sqlite3.SQLITE_TOOBIG: "corrupt",  # nothing written is that long
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_PERM: "unwritable",
    sqlite3.SQLITE_READONLY: "unwritable",
    sqlite3.SQLITE_CANTOPEN: "unwritable",
    sqlite3.SQLITE_IOERR: "unwritable",
}


class _LaterFormatError(StateError):
    """Raised for a file written by a later version of the gateway."""


class SqliteStore:
    """A `Store` in an SQLite file; nothing is opened before the first call."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        # The file, on a local disk. A corrupt file is renamed and replaced by a new one.
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def stamps(self) -> dict[str, str]:
        """See `Store.stamps`."""
        with self._transaction() as connection:
            return dict(connection.execute("SELECT name, stamp FROM entries WHERE stamp != ''"))

    def read(self, names: Collection[str]) -> dict[str, Entry]:
        """See `Store.read`."""
        found = {}
        with self._transaction() as connection:
            for name in names:
                row = connection.execute("SELECT stamp, value FROM entries WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    found[name] = Entry(*row)
        return found

    def commit(self, expected: Mapping[str, str], changes: Mapping[str, Entry | None]) -> bool:
        """See `Store.commit`."""
        with self._transaction("IMMEDIATE") as connection:
            for name, stamp in expected.items():
                row = connection.execute("SELECT stamp FROM entries WHERE name = ?", (name,)).fetchone()
                if (row[0] if row else "") != stamp:
                    return False
            connection.execute("DELETE FROM entries WHERE end_s > 0 AND end_s <= ?", (time.time(),))
            for name, entry in changes.items():
                if entry is None:
                    connection.execute("DELETE FROM entries WHERE name = ?", (name,))
                else:
                    row = (name, entry.stamp, entry.end_s, entry.value)
                    connection.execute("REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
        return True

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
            if _is_corrupt(error):
                with contextlib.suppress(sqlite3.Error, StateError):  # raises the first error; the next call retries
                    open_file(self._path).close()
            raise StateError(_KINDS.get(_primary_code(error), "refused"), f"{self._path}: {error}") from error
        except OSError as error:
            self.close()
            raise StateError("unwritable", f"{self._path}: {error.strerror}") from error

    def _opened(self) -> sqlite3.Connection:
        """Return the connection, reopened if the file was deleted or replaced."""
        if self._connection is not None:
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    return self._connection
            self.close()
        try:
            self._connection = open_file(self._path)
        except _LaterFormatError as error:
            own = copy_of(self._path, _FORMAT)
            logger.error("%s; it is left as it is, and %s is used: %s", error, own.name, _ORIGINS[own.exists()])  # noqa: TRY400
            self._path, self.location = own, str(own)
            self._connection = open_file(own)
        self._inode = self._path.stat().st_ino
        return self._connection


def open_file(path: Path) -> sqlite3.Connection:
    """Open the file, or create it; a corrupt file is renamed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        check_regular(path, os.stat(path))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # one process at a time opens or renames a file
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            _set_aside(path)
        return _open(path)
    finally:
        os.close(folder)


def _is_corrupt(error: sqlite3.Error) -> bool:
    """Return whether an error means that the file is corrupt."""
    return _KINDS.get(_primary_code(error)) == "corrupt"


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # 0: an error of the Python module


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except UnicodeDecodeError as error:  # SQLite repeats damaged names in its message
        connection.close()
        raise _corruption(f"damaged schema: {error.object!r}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _corruption(message: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id != _APPLICATION_ID and (application_id or tables):
        raise StateError("foreign", f"{path}: not a state file of the gateway")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _FORMAT:
        raise _LaterFormatError("foreign", f"{path}: written by a later version of the gateway (format {version})")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a power failure may lose the last seconds, but not the file
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES}"
            f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_FORMAT}; COMMIT;"
        )
    (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":
        raise _corruption(result)


def copy_of(path: Path, version: int) -> Path:
    """Return the path of the copy, in an older format, of a file that a later version has converted."""
    return path.with_name(f"{path.name}.format-{version}")


def _set_aside(path: Path) -> None:
    renamed = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(renamed.with_name(renamed.name + suffix))
    logger.error("%s is corrupt; it was renamed to %s and a new file is created", path, renamed.name)
