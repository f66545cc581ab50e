"""What outlives a run: notes of the lines that were begun and of their answers, and the tokens that a key has spent."""

from __future__ import annotations

import asyncio
import math
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from backends import background
from gateway.rooms.batches.storage import Storage

_MOST_NOTE_BYTES: Final = 256 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
BEGUN, RETURNED, COMPLETED, FAILED = b"?", b"-", b"+", b"!"
"""What is noted of a line: that it was begun, that this does not count as a run; or its answer."""


class Notes:
    """The notes in a folder. Each run appends to a file of its own; a note that is cut off fails its checksum.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> notes = Notes(Storage(pathlib.Path(tempfile.mkdtemp())), "notes")
    >>> asyncio.run(notes.add(BEGUN, 7)), asyncio.run(notes.add(COMPLETED, 8, b"{}"))
    (None, None)
    >>> [*notes.answers()], notes.answered, notes.runs
    ([(b'+', b'{}')], {8}, Counter({7: 1}))
    """

    def __init__(self, storage: Storage, folder: str, is_over: Callable[[], bool] = bool) -> None:
        self._storage = storage
        self._folder = folder
        self._path = f"{folder}/{os.urandom(8).hex()}"
        self._is_over = is_over  # whether what cannot be written is left to others
        self._writing = asyncio.Lock()
        self._unwritten: list[bytes] = []
        self.answered: set[int] = set()  # lines, when all was read
        self.runs: Counter[int] = Counter()  # by line

    def answers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield whether a line has succeeded, and what is written of it: for each line that which comes first."""
        self.answered, self.runs = set(), Counter()
        for name in self._storage.names(self._folder):
            try:
                for note in self._storage.lines(f"{self._folder}/{name}", _MOST_NOTE_BYTES):
                    number, _, rest = note.partition(b" ")
                    kind, checksum, document = rest[:1], rest[2:10], rest[11:]
                    if not number.isdigit() or len(number) > 9 or checksum != b"%08x" % zlib.crc32(document):
                        continue
                    if kind in {BEGUN, RETURNED}:
                        self.runs[int(number)] += 1 if kind == BEGUN else -1
                    elif int(number) not in self.answered:
                        self.answered.add(int(number))
                        yield kind, document
            except OSError as error:
                self._storage.set_aside(f"{self._folder}/{name}", error)

    async def add(self, kind: bytes, number: int, document: bytes = b"") -> None:
        """Add a note durably, together with those that came while others were written.

        What cannot be written waits, and is tried again: the place may be full, or out of reach for a while.
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
                    background.note("batches", error, of=self._folder, then=f"; it is tried again in {pause_s:g} s")
                    await asyncio.sleep(pause_s)
                    pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
                else:
                    del self._unwritten[:count]


class Spending:
    """The tokens of a key's lines on one day (UTC)."""

    def __init__(self, storage: Storage, owner: str) -> None:
        self._storage, self._path = storage, f"{owner}/spent.json"
        self._day, self._tokens = "", 0
        self._lines, self._all_tokens = 0, 0  # of this run

    def read(self) -> None:
        """Read what was spent before."""
        spent = self._storage.read(self._path) or {}
        if isinstance(spent.get("day"), str) and isinstance(spent.get("tokens"), int):
            self._day, self._tokens = spent["day"], spent["tokens"]

    def save(self) -> None:
        """Write what was spent."""
        self._storage.write_json(self._path, {"day": self._day, "tokens": self._tokens})

    def ahead(self, lines: int) -> float:
        """Return what so many lines are expected to cost: each the mean of those before, or without any infinity."""
        return lines * (self._all_tokens / self._lines if self._lines else math.inf) if lines else 0.0

    def has_left(self, in_flight: int, per_day: float | None) -> bool:
        """Return whether another line may begin beside those in flight."""
        self.add(0)
        return (
            per_day is None
            or self._tokens + (self.ahead(in_flight + 1) if self._lines or in_flight else 1.0) <= per_day
        )

    def add(self, tokens: int) -> None:
        """Add the tokens of a line."""
        if self._day != (today := time.strftime("%Y-%m-%d", time.gmtime())):
            self._day, self._tokens = today, 0
        self._tokens, self._all_tokens = self._tokens + tokens, self._all_tokens + tokens
        self._lines += tokens > 0
