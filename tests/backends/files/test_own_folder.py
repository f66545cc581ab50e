"""Folders that this run makes for itself."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from backends.files.own_folder import make_own


def test_a_folder_is_made_once_for_this_user_alone_and_locked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert (make_own(folder), make_own(folder)) == (True, False)
    assert folder.stat().st_mode & 0o777 == 0o700
    held = os.open(folder, os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held)


@pytest.mark.parametrize("kind", ["another user's", "open", "link"])
def test_a_folder_of_others_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = tmp_path / "run"
    if kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir(mode=0o700)
    if kind == "open":
        folder.chmod(0o777)
    elif kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="remove it"):
        make_own(folder)
