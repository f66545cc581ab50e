"""What outlives a run: notes of started lines and of their answers, and the tokens that a key has spent."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from backends import background
from gateway.rooms.batches.storage import Storage

_MOST_NOTE_BYTES: Final = 256 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
RUNS, COMPLETED, FAILED = b"?", b"+", b"!"
"""Kinds of notes on a line: how many of its runs count, or its answer."""


class Notes:
    """The notes of a batch; a truncated one fails its checksum.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> notes = Notes(Storage(pathlib.Path(folder.name)), "notes")
    >>> asyncio.run(notes.add(RUNS, 7, b"1")), asyncio.run(notes.add(COMPLETED, 8, b"{}"))
    (None, None)
    >>> [*notes.answers()], notes.answered, notes.runs
    ([(b'+', b'{}')], {8}, {7: 1})
    >>> folder.cleanup()
    """

    def __init__(self, storage: Storage, path: str, is_over: Callable[[], bool] = bool) -> None:
        self._storage = storage
        self._path = path
        self._is_over = is_over  # whether to give up what cannot be written
        self._writing = asyncio.Lock()
        self._unwritten: list[bytes] = []
        self.answered: set[int] = set()  # numbers of lines, once `answers` has been read to its end
        self.runs: dict[int, int] = {}  # by line

    def answers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield whether a line succeeded, and its output: the first note of each line counts."""
        self.answered, self.runs = set(), {}
        try:
            for note in self._storage.lines(self._path, _MOST_NOTE_BYTES):
                number, _, rest = note.partition(b" ")
                kind, checksum, document = rest[:1], rest[2:10], rest[11:]
                if not number.isdigit() or len(number) > 9 or checksum != b"%08x" % zlib.crc32(document):
                    continue
                if kind == RUNS:
                    self.runs[int(number)] = int(document)
                elif int(number) not in self.answered:
                    self.answered.add(int(number))
                    yield kind, document
        except FileNotFoundError:
            return

    async def add(self, kind: bytes, number: int, document: bytes = b"") -> None:
        """Add a note durably, together with those that arrived during the previous write.

        A failed write is retried: the disk may be full or unreachable for a while.
        """
        self._unwritten.append(b"\n%d %b %08x %b" % (number, kind, zlib.crc32(document), document))
        async with self._writing:
            pause_s = _FIRST_PAUSE_S
            while self._unwritten:
                count = len(self._unwritten)
                try:
                    await asyncio.to_thread(self._storage.append, self._path, b"".join(self._unwritten))
                except OSError as error:
                    if self._is_over():
                        raise
                    background.note("batches", error, of=self._path, then=f"; it is tried again in {pause_s:g} s")
                    await asyncio.sleep(pause_s)
                    pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
                else:
                    del self._unwritten[:count]


@dataclass
class Spent:
    """The tokens of a key's lines on one day (UTC), and the cost of lines in this run."""

    day: str = ""
    tokens: int = 0

    def __post_init__(self) -> None:
        self._lines, self._tokens = 0, 0

    def ahead(self, lines: int) -> float:
        """Return the expected cost of a number of lines: the mean of earlier ones each, or infinity without any."""
        return lines * (self._tokens / self._lines if self._lines else math.inf) if lines else 0.0

    def has_left(self, in_flight: int, per_day: float | None) -> bool:
        """Return whether another line may begin next to those in flight; the very first one needs just one token."""
        self.add(0)
        next_tokens = self.ahead(in_flight + 1) if self._lines or in_flight else 1.0
        return per_day is None or self.tokens + next_tokens <= per_day

    def add(self, tokens: int) -> None:
        """Add the tokens of a line."""
        if self.day != (today := time.strftime("%Y-%m-%d", time.gmtime())):
            self.day, self.tokens = today, 0
        self.tokens, self._tokens = self.tokens + tokens, self._tokens + tokens
        self._lines += tokens > 0
