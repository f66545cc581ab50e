"""An SQLite file that several processes use: opened, checked, and set aside when it is broken."""

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

_APPLICATION_ID = 0x5350_4757  # "SPGW": tells our file from any other
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
    """Open the file, and make it if it is not there; a broken one is set aside first.

    Raises
    ------
    OSError
        If its folder cannot be made or read.
    sqlite3.Error
        If it cannot be opened or written.
    StateError
        If it is somebody else's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            _set_aside(path)
        return _open(path)


def set_aside(path: Path) -> None:
    """Rename a file that proved broken while it was used, unless another process has done so already."""
    with _alone(path.parent):
        try:
            _open(path).close()
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            _set_aside(path)


def probe(path: Path) -> None:
    """Try whether a file that exists can be used; it is left as it is.

    Raises
    ------
    sqlite3.Error
        If it cannot be opened or written, or is broken.
    StateError
        If it is somebody else's.
    """
    _open(path).close()


def is_corrupt(error: sqlite3.Error) -> bool:
    """Return whether an error says that the file is broken."""
    return primary_code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's own code of an error, 0 for one of the Python module's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id != _APPLICATION_ID and (application_id or tables):
        raise StateError("foreign", f"{path}: not a file of the gateway's")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # power that fails may cost the last seconds, never the file
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES}"
            f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_FORMAT}; COMMIT;"
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT:
        raise StateError("foreign", f"{path}: written by another version of the gateway (format {version})")
    (sound,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if sound != "ok":
        error = sqlite3.DatabaseError(sound)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _set_aside(path: Path) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    kept = path.with_name(f"{path.name}.corrupt-{stamp}")
    count = 1
    while kept.exists():
        count += 1
        kept = path.with_name(f"{path.name}.corrupt-{stamp}-{count}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    logger.error("%s is corrupt; it is kept as %s, and a new one is begun", path, kept.name)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold off other processes that open or set aside a file in this folder; the lock is the folder's own."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
