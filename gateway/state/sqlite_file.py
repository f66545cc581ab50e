"""The SQLite file of the state: opening, checking, and renaming it if it is corrupt."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from gateway.state.store import StateError

logger = logging.getLogger(__name__)

_APPLICATION_ID = 0x5350_4757  # "SPGW": marks the file as the gateway's
_FORMAT = 1
_BUSY_S = 2.0
_TABLES = """
CREATE TABLE pages (
    model TEXT NOT NULL, page TEXT NOT NULL, generation TEXT NOT NULL, version INTEGER NOT NULL, end_s REAL NOT NULL,
    PRIMARY KEY (model, page)
) WITHOUT ROWID;
CREATE TABLE cells (
    model TEXT NOT NULL, page TEXT NOT NULL, key TEXT NOT NULL, sums TEXT NOT NULL,
    PRIMARY KEY (model, page, key)
) WITHOUT ROWID;
CREATE TABLE batches (
    model TEXT NOT NULL, page TEXT NOT NULL, writer TEXT NOT NULL, batch INTEGER NOT NULL,
    PRIMARY KEY (model, page, writer)
) WITHOUT ROWID;
CREATE TABLE documents (
    name TEXT NOT NULL, version INTEGER NOT NULL, text TEXT NOT NULL, written_s REAL NOT NULL,
    PRIMARY KEY (name, version)
) WITHOUT ROWID;
"""


def open_file(path: Path) -> sqlite3.Connection:
    """Open the file, or create it; a corrupt file is renamed first.

    Raises
    ------
    OSError
        If its folder cannot be created or read.
    sqlite3.Error
        If it cannot be opened or written.
    StateError
        If it belongs to another program or version.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            _set_aside(path)
        return _open(path)


def set_aside(path: Path) -> None:
    """Rename a file that turned out to be corrupt, unless another process has already done so."""
    with _locked(path.parent):
        try:
            _open(path).close()
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            _set_aside(path)


def probe(path: Path) -> None:
    """Check that an existing file can be used.

    Raises
    ------
    sqlite3.Error
        If it cannot be opened or written, or is corrupt.
    StateError
        If it belongs to another program or version.
    """
    _open(path).close()


def is_corrupt(error: sqlite3.Error) -> bool:
    """Return whether an error means that the file is corrupt."""
    return primary_code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code of an error, 0 for an error of the Python module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except UnicodeDecodeError as error:  # SQLite quotes damaged names in its message
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
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a power failure may lose the last seconds, but not the file
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES}"
            f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_FORMAT}; COMMIT;"
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT:
        raise StateError("foreign", f"{path}: written by another version of the gateway (format {version})")
    (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":
        raise _corruption(result)


def _set_aside(path: Path) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    renamed = path.with_name(f"{path.name}.corrupt-{stamp}")
    count = 1
    while renamed.exists():
        count += 1
        renamed = path.with_name(f"{path.name}.corrupt-{stamp}-{count}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(renamed.with_name(renamed.name + suffix))
    logger.error("%s is corrupt; it was renamed to %s and a new file is created", path, renamed.name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder, so that one process at a time opens or renames a file in it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
