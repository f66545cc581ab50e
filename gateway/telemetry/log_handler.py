"""Writes the log in a thread of its own, so that a standard error that nobody reads stops nothing else."""

from __future__ import annotations

import logging
import os
import select
import threading
from queue import SimpleQueue
from typing import Final, TextIO


class LogHandler(logging.Handler):
    """Queues lines for a stream. Once too many wait, further ones are lost, until all that wait are written."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._file = -1 if stream is None else stream.fileno()  # None: it was closed before the start
        self._lines = SimpleQueue[bytes | None]()
        self._counting = threading.RLock()  # garbage collection may log at any place
        self._waiting_bytes = 0
        self._lost = 0  # lines since the last one that was queued
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def is_losing(self) -> bool:
        """Whether lines are being lost."""
        return self._lost > 0

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record, or count it as lost."""
        try:
            line = self._line_of(record)
            size = len(line)
        except Exception:  # noqa: BLE001 -- as any handler of `logging`
            self.handleError(record)
            return
        with self._counting:
            if self._lost or self._waiting_bytes >= MOST_WAITING_BYTES:
                self._lost += 1
                return
            self._waiting_bytes += size
            self._lines.put(line)

    def close(self) -> None:
        """Write what waits, for at most a second; `logging` calls this when the process exits."""
        self._lines.put(None)
        self._thread.join(_LAST_S)
        super().close()

    def _line_of(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            size = len(line)
            self._write(line)
            with self._counting:
                self._waiting_bytes -= size
                lost = 0 if self._waiting_bytes else self._lost
                self._lost -= lost
            if lost:
                text = f"{lost} lines of the log were lost here: standard error was not read"
                fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
                self._write(self._line_of(logging.makeLogRecord(fields)))

    def _write(self, line: bytes) -> None:
        """Write a line at once, so that those of other workers do not get into it."""
        try:
            while line:
                try:
                    line = line[os.write(self._file, line) :]
                except BlockingIOError:
                    select.select([], [self._file], [])
        except OSError:
            return  # there is no other place to report it


def is_losing() -> bool:
    """Return whether lines of the log are being lost."""
    return any(isinstance(each, LogHandler) and each.is_losing for each in logging.getLogger().handlers)


MOST_WAITING_BYTES: Final = 2**20
_LAST_S: Final = 1.0
