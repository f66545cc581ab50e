"""The SQLite file: renamed if corrupt, untouched if foreign, reopened if replaced."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.state import sqlite
from gateway.state.sqlite import SqliteStore, open_file
from gateway.state.store import StateError
from tests.support.state_member import LENGTH, Member, in_step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "state.sqlite"


@pytest.fixture
def member(path: Path) -> Iterator[Member]:
    """A member with statistics in the file."""
    member = Member(SqliteStore(path))
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    member.sync()
    yield member
    member.store.close()


def corrupt(path: Path) -> bytes:
    """Overwrite all but the header of the file, as a failing disk might."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(200)
        file.write(os.urandom(size - 200))
    return path.read_bytes()


def renamed_files(path: Path) -> list[Path]:
    files = path.parent.glob("state.sqlite.corrupt-*")
    return [file for file in files if not file.name.endswith(("-wal", "-shm"))]


@pytest.mark.parametrize("content", ["corrupted", "no database at all", "damaged schema"])
def test_a_corrupt_file_is_renamed_at_start(
    path: Path, member: Member, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    member.store.close()
    if content == "corrupted":
        broken = corrupt(path)
    elif content == "damaged schema":  # with bytes that SQLite repeats in its message, and that are not UTF-8
        broken = re.sub(rb"table\w\w", b"table\xff\xfe", path.read_bytes()).replace(b"CREATE TABLE", b"CREATE TABLX")
        path.write_bytes(broken)
    else:
        broken = b"no database at all " * 100
        path.write_bytes(broken)
    fresh = Member(SqliteStore(path), member.clock)
    with caplog.at_level(logging.ERROR):
        fresh.sync()
    assert fresh.buckets() == {}
    (renamed,) = renamed_files(path)
    assert renamed.read_bytes()[200:] == broken[200:]
    assert renamed.name in caplog.text
    fresh.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(fresh)
    in_step(member)
    assert member.buckets() == {("k",): (2.0, 11.0)}
    fresh.store.close()


@pytest.mark.slow
def test_a_file_corrupted_while_in_use_is_renamed(path: Path, member: Member) -> None:
    # More rows than fit into SQLite's page cache.
    for number in range(3000):
        member.statistics.add(LENGTH, (f"key {number}", "x" * 100), 1.0, 5.0)
    member.sync()
    expected = member.buckets()
    reader = Member(SqliteStore(path), member.clock)
    corrupt(path)
    kinds = []
    for _ in range(6):
        for user in (member, reader):
            try:
                user.sync()
            except StateError as error:
                kinds.append(error.kind)
    assert set(kinds) <= {"corrupt"}
    open_file(path).close()  # as another process does that finds it corrupt too late
    assert len(renamed_files(path)) == 1
    assert reader.buckets() == expected
    reader.store.close()


def test_a_file_of_another_program_is_not_changed(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StateError, match="not a state file of the gateway") as caught:
        SqliteStore(path).stamps()
    assert caught.value.kind == "foreign"
    assert path.read_bytes() == before


def test_sums_refused_by_a_full_disk_are_pushed_later(member: Member) -> None:
    assert isinstance(member.store, SqliteStore)
    connection = member.store._opened()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")  # the error is that of a full disk
    for number in range(500):
        member.statistics.add(LENGTH, (f"key {number}", "x" * 100), 1.0, 5.0)
    with pytest.raises(StateError) as caught:
        member.sync()
    assert caught.value.kind == "full"
    in_step(member)
    late = Member(SqliteStore(Path(member.store.location)), member.clock)
    late.sync()
    assert late.buckets() == member.buckets()
    assert len(late.buckets()) == 501
    late.store.close()


def test_a_locked_file_times_out(path: Path, member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_S", 0.1)
    member.store.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    member.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    with pytest.raises(StateError) as caught:
        member.sync()
    assert caught.value.kind == "timeout"
    connection.execute("ROLLBACK")
    connection.close()
    in_step(member)
    assert member.buckets() == {("k",): (2.0, 11.0)}
