"""The file: set aside when it is broken, left alone when it is another's, followed when it is replaced."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.state import sqlite_file
from gateway.state.sqlite import SqliteStore
from gateway.state.sqlite_file import set_aside
from gateway.state.store import StateError
from tests.support.state_member import LENGTH, Member, in_step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made for it" / "state.sqlite"


@pytest.fixture
def member(path: Path) -> Iterator[Member]:
    """One that has learned something that is in the file."""
    member = Member(SqliteStore(path))
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    member.sync()
    yield member
    member.store.close()


def spoil(path: Path) -> bytes:
    """Overwrite all but the header of the file, as a failing disk might."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(200)
        file.write(os.urandom(size - 200))
    return path.read_bytes()


def kept_aside(path: Path) -> list[Path]:
    return [one for one in path.parent.glob("state.sqlite.corrupt-*") if not one.name.endswith(("-wal", "-shm"))]


def test_nothing_is_made_before_it_is_used(path: Path) -> None:
    SqliteStore(path).close()
    assert not path.parent.exists()


@pytest.mark.parametrize("content", ["spoiled", "no database at all"])
def test_a_corrupt_file_is_set_aside_at_start(
    path: Path, member: Member, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    member.store.close()
    if content == "spoiled":
        broken = spoil(path)
    else:
        broken = b"no database at all " * 100
        path.write_bytes(broken)
    fresh = Member(SqliteStore(path), member.clock)
    with caplog.at_level(logging.ERROR):
        fresh.sync()
    assert fresh.buckets() == {}
    (aside,) = kept_aside(path)
    assert aside.read_bytes()[200:] == broken[200:]
    assert aside.name in caplog.text
    fresh.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(fresh)
    in_step(member)
    assert member.buckets() == {("k",): (2.0, 11.0)}
    fresh.store.close()


def test_a_file_that_becomes_corrupt_while_it_is_used_is_set_aside(path: Path, member: Member) -> None:
    # As many cells as do not fit into what SQLite holds in memory already.
    for number in range(3000):
        member.statistics.add(LENGTH, (f"key {number}", "x" * 100), 1.0, 5.0)
    member.sync()
    expected = member.buckets()
    reader = Member(SqliteStore(path), member.clock)
    spoil(path)
    kinds = []
    for _ in range(6):
        for one in (member, reader):
            try:
                one.sync()
            except StateError as error:
                kinds.append(error.kind)
                one.ledger.read_again()
    assert set(kinds) <= {"corrupt"}
    assert len(kept_aside(path)) == 1
    assert reader.buckets() == expected
    reader.store.close()


def test_who_comes_second_to_a_corrupt_file_finds_it_replaced(path: Path, member: Member) -> None:
    set_aside(path)  # another process has put a sound one in its place
    assert not kept_aside(path)
    in_step(member)
    assert member.buckets() == {("k",): (1.0, 5.0)}


def test_a_file_that_was_taken_away_is_begun_again(path: Path, member: Member) -> None:
    for file in path.parent.iterdir():
        file.unlink()
    in_step(member)
    late = Member(SqliteStore(path), member.clock)
    late.sync()
    assert late.buckets() == {("k",): (1.0, 5.0)}
    late.store.close()


def test_the_file_of_another_program_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StateError, match="not a file of the gateway's") as caught:
        SqliteStore(path).stamps("m")
    assert caught.value.kind == "foreign"
    assert path.read_bytes() == before


def test_the_file_of_a_later_version_is_left_alone(path: Path, member: Member) -> None:
    member.store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StateError, match="format 7"):
        member.sync()
    assert not kept_aside(path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"File exists|Not a directory") as caught:
        SqliteStore(tmp_path / "file" / "state.sqlite").stamps("m")
    assert caught.value.kind == "unwritable"


def test_a_full_disk_is_told_and_what_was_to_be_written_comes_later(member: Member) -> None:
    assert isinstance(member.store, SqliteStore)
    connection = member.store._opened()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")  # what SQLite does where there is no more room
    for number in range(500):
        member.statistics.add(LENGTH, (f"key {number}", "x" * 100), 1.0, 5.0)
    with pytest.raises(StateError) as caught:
        member.sync()
    assert caught.value.kind == "full"
    in_step(member)
    late = Member(SqliteStore(Path(member.store.place)), member.clock)
    late.sync()
    assert late.buckets() == member.buckets()
    assert len(late.buckets()) == 501
    late.store.close()


def test_one_that_is_held_up_by_another_says_so(path: Path, member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_BUSY_S", 0.1)
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
