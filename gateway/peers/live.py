"""Where the processes of a pool exchange reports: each writes its own, and reads those of the others.

This runs in a thread of its own, some 20 times per second; nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Protocol

from backends import background
from backends.files.own_folder import check_own
from gateway.state.store import StateError


class Live(Protocol):
    """Where the processes of a pool put their reports. Its methods raise `StateError` if it cannot be reached."""

    location: str  # for messages, without passwords

    def exchange(self, report: bytes, gone: Collection[str]) -> list[bytes]:
        """Write this process's report unless it is empty, remove those of `gone`, and return those that changed."""

    def leave(self) -> None:
        """Remove this process's report."""


class LiveFolder:
    """Reports of the workers of one gateway: a file for each, in a folder removed with the gateway."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.location = str(folder)
        self._folder = folder
        self._writer = writer  # unique name of this process
        self._known: dict[str, tuple[int, int]] = {}  # the state of each file when last read

    def exchange(self, report: bytes, gone: Collection[str]) -> list[bytes]:
        """See `Live.exchange`."""
        try:
            check_own(self._folder)
            if report:
                written = self._folder / f"{self._writer}.new"
                written.write_bytes(report)
                written.replace(self._folder / self._writer)
            for writer in gone:
                (self._folder / writer).unlink(missing_ok=True)
            paths = [path for path in self._folder.iterdir() if path.name != self._writer and not path.suffix]
        except OSError as error:
            raise StateError("unwritable", f"{self.location}: {error.strerror}") from error
        before, self._known = self._known, {}
        reports = []
        for path in paths:
            with background.guarded("peers", of=path.name), suppress(FileNotFoundError):  # of a worker that has left
                found = path.stat()
                stamp = self._known[path.name] = found.st_ino, found.st_mtime_ns
                if before.get(path.name) != stamp and S_ISREG(found.st_mode):
                    reports.append(path.read_bytes())
        return reports

    def leave(self) -> None:
        """See `Live.leave`."""
        (self._folder / self._writer).unlink(missing_ok=True)
