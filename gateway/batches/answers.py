"""The answers of a batch as they come, before its output is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import orjson

from gateway.batches.records import Document
from gateway.batches.storage import Storage

_PART_BYTES: Final = 1 << 18


class Answers:
    """The answers to the lines of a batch, in parts that each run of it names after itself."""

    def __init__(self, storage: Storage, folder: str, run: str) -> None:
        self._storage = storage
        self._folder = folder
        self._run = run
        self._seen = bytearray()  # by number of the line, whether it has an answer
        self._unwritten: list[bytes] = []
        self._part = b""
        self._part_number = 0
        self._writing = asyncio.Lock()

    def has(self, number: int) -> bool:
        """Return whether a line had an answer when all were read."""
        return number < len(self._seen) and bool(self._seen[number])

    async def write(self, number: int, written: Document, *, is_ok: bool) -> None:
        """Write an answer durably, together with those that came while others were written."""
        self._unwritten.append(orjson.dumps([number, is_ok, written]) + b"\n")
        async with self._writing:
            if not self._unwritten:
                return
            self._part += b"".join(self._unwritten)
            self._unwritten.clear()
            path = f"{self._folder}/{self._run}-{self._part_number:06}"
            await asyncio.to_thread(self._storage.write, path, [self._part])
            if len(self._part) >= _PART_BYTES:
                self._part, self._part_number = b"", self._part_number + 1

    def read(self) -> Iterator[tuple[bool, Document]]:
        """Yield whether a line succeeded, and what is written of it: for each line that which comes first.

        What is left of a line whose writing was cut off is no answer.
        """
        seen = bytearray()
        for name in self._storage.names(self._folder):
            for line in self._storage.lines(f"{self._folder}/{name}"):
                try:
                    number, is_ok, written = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                seen.extend(bytes(max(0, number + 1 - len(seen))))
                if not seen[number]:
                    seen[number] = True
                    yield is_ok, written
        self._seen = seen
