"""The notes of a run: which lines were begun, and the answers, from which whoever goes on knows what is left."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from backends import background
from gateway.batches.storage import Storage

_PART_BYTES: Final = 1 << 18
_MOST_NOTE_BYTES: Final = 256 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
BEGUN, RETURNED, COMPLETED, FAILED = b"?", b"-", b"+", b"!"
"""What is noted of a line: that it was begun, or was not ended by who goes; or its answer."""


class Notes:
    """The notes in a folder. Each run adds parts of its own; each note has a checksum, since a write may be cut off.

    Examples
    --------
    >>> notes = Notes(Storage("memory://doctest"), "notes")
    >>> asyncio.run(notes.add(BEGUN, 7)), asyncio.run(notes.add(COMPLETED, 7, b"{}"))
    (None, None)
    >>> [*notes.answers()], notes.has(7), notes.has(8)
    ([(b'+', b'{}')], True, False)
    """

    def __init__(self, storage: Storage, folder: str, is_over: Callable[[], bool] = bool) -> None:
        self._storage = storage
        self._folder = folder
        self._is_over = is_over  # whether what cannot be written is left to others
        self._writing = asyncio.Lock()
        self._answered = bytearray()  # by number of the line, when all were read
        self._unwritten: list[bytes] = []
        self._part, self._part_number, self._holder = b"", 0, os.urandom(8).hex()
        self.begun: Counter[int] = Counter()  # by line: how often it was begun by processes that are gone

    def has(self, number: int) -> bool:
        """Return whether a line had an answer when all were read."""
        return number < len(self._answered) and self._answered[number] > 0

    def answers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield whether a line has succeeded, and what is written of it: for each line that which comes first."""
        answered, self.begun = bytearray(), Counter()
        for name in self._storage.names(self._folder):
            for number, kind, document in self._read(f"{self._folder}/{name}"):
                answered.extend(bytes(max(0, number + 1 - len(answered))))
                if kind in {BEGUN, RETURNED}:
                    self.begun[number] += 1 if kind == BEGUN else -1
                elif not answered[number]:
                    answered[number] = 1
                    yield kind, document
        self._answered = answered

    def _read(self, path: str) -> Iterator[tuple[int, bytes, bytes]]:
        try:
            for note in self._storage.lines(path, _MOST_NOTE_BYTES):
                number, _, rest = note.partition(b" ")
                kind, checksum, document = rest[:1], rest[2:10], rest[11:]
                if number.isdigit() and len(number) < 10 and checksum == b"%08x" % zlib.crc32(document):
                    yield int(number), kind, document
        except OSError as error:
            self._storage.set_aside(path, error)

    async def add(self, kind: bytes, number: int, document: bytes = b"") -> None:
        """Add a note durably, together with those that came while others were written.

        What cannot be written waits, and is tried again: the place may be full, or out of reach for a while.
        """
        self._unwritten.append(b"%d %b %08x %b\n" % (number, kind, zlib.crc32(document), document))
        async with self._writing:
            pause_s = _FIRST_PAUSE_S
            while self._unwritten:
                count, part = len(self._unwritten), self._part + b"".join(self._unwritten)
                try:
                    path = f"{self._folder}/{self._holder}-{self._part_number:06}"
                    await asyncio.to_thread(self._storage.write, path, [part])
                except OSError as error:
                    if self._is_over():
                        raise
                    background.note("batches", error, of=self._folder, then=f"; it is tried again in {pause_s:g} s")
                    await asyncio.sleep(pause_s)
                    pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
                    continue
                del self._unwritten[:count]
                self._part = part
                if len(part) >= _PART_BYTES:
                    self._part, self._part_number = b"", self._part_number + 1
