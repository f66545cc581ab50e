"""Reads lines of files of any length, compressed or plain, complete or truncated."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from backends.validation import UsageError
from lab.trace.duck import database, rows

Compression = Literal["none", "gzip", "zstd"]

MAX_LINE_BYTES = 256 * 2**20
"""Length from which a line is no record: binary files may have no newlines at all."""

_CHUNK_BYTES = 1 << 14  # uncompressed; the most that is lost before a damaged position
_MAX_ENTRY_BYTES = 16 * 2**20  # of a list
_MARK = b"\xef\xbb\xbf"  # which some Windows programs put at the start of a text
_PACKED_BYTES = 256  # of zstd to unpack at a time: 4 bytes can hold 128 KiB


class TraceError(UsageError):
    """A trace that cannot be read or written; the message names the file, and the line if known."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is not a valid record.

    Examples
    --------
    >>> print(BrokenLine(Path("trace.jsonl"), 3, "not JSON"))
    trace.jsonl:3: not JSON
    """

    path: Path
    number: int  # line number from 1; in a file that is one JSON list, the entry's number
    why: str  # what is wrong with the line
    is_cut: bool = False  # whether the file ends there, damaged or truncated

    def __str__(self) -> str:
        """Return path, line and problem in a compiler's format."""
        return f"{self.path}:{self.number}: {self.why}"


Report = Callable[[BrokenLine], None]


class BrokenLines:
    """Counts broken lines and prints only the first few, as every line of a wrong kind of file is broken.

    Examples
    --------
    >>> broken = BrokenLines(print)
    >>> broken(BrokenLine(Path("trace.jsonl"), 3, "not JSON"))
    trace.jsonl:3: not JSON; skipped
    >>> broken.count
    1
    """

    SHOWN = 10

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say  # function that prints a line of text
        self.count = 0  # number of broken lines so far

    def __call__(self, broken: BrokenLine) -> None:
        """Count a broken line, and print it if it is among the first few."""
        self.count += 1
        if self.count <= self.SHOWN:
            self._say(f"{broken}; skipped")
        elif self.count == self.SHOWN + 1:
            self._say("Further broken lines are skipped and only counted.")


def refuse(broken: BrokenLine) -> None:
    """Raise for a broken line."""
    raise TraceError(str(broken))


def compression_of(path: Path) -> Compression:
    """Return a file's compression, according to its first bytes."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    return "zstd" if magic == b"\x28\xb5\x2f\xfd" else "none"


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it as it is read; zstd files may have many frames, like the recorder's."""
    compression = compression_of(path)
    with path.open("rb") as file:
        if compression == "gzip":
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], unpacked)
        elif compression == "zstd":
            yield cast(IO[bytes], io.BufferedReader(_Frames(file), _CHUNK_BYTES))
        else:
            yield file


def read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged file may raise."""
    import zstandard

    return OSError, EOFError, zlib.error, zstandard.ZstdError


def begins_a_list(path: Path) -> bool:
    """Return whether a file starts with a JSON list; False if its start is damaged."""
    with suppress(*read_errors()), open_unpacked(path) as file:
        return file.read(4096).removeprefix(_MARK).lstrip(b" \t\r\n")[:1] == b"["
    return False


class _Frames(io.RawIOBase):
    """Decompresses a sequence of zstd frames.

    Unlike zstandard's own reader, it raises if the file ends within a frame.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._frame: Any = None  # the current frame's decompressor
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._unpacked:
            packed = self._packed or self._file.read(_PACKED_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it was cut off within a zstd frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._unpacked = memoryview(self._frame.decompress(packed))
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


def numbered_lines(path: Path, report: Report) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines with their numbers from 1, in memory bounded by the longest line.

    Reads a file that is damaged, or truncated because its writer was killed, up to that position, and reports the
    damage as a broken line.
    """
    number = 0
    with open_unpacked(path) as file:
        while True:
            try:
                line = file.readline(MAX_LINE_BYTES)
            except read_errors() as error:
                report(BrokenLine(path, number + 1, f"the file is damaged from here on: {error}", is_cut=True))
                return
            if not line:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(_MARK)
            if len(line) == MAX_LINE_BYTES:
                report(BrokenLine(path, number, f"longer than {MAX_LINE_BYTES >> 20} MiB: not a trace"))
                return
            if not line.isspace():
                yield number, line


def entries(path: Path, report: Report) -> Iterator[tuple[int, bytes | str]]:
    """Yield the JSON of each entry in a list with its position from 1, or each line with its number."""
    if not begins_a_list(path):
        yield from numbered_lines(path, report)
        return
    import duckdb

    query = "select json from read_json_objects(?, format = 'array', compression = ?, maximum_object_size = ?)"
    with database() as connection:
        try:
            found = rows(connection, query, [str(path), compression_of(path), _MAX_ENTRY_BYTES])
            for number, (entry,) in enumerate(found, 1):
                yield number, entry
        except duckdb.Error as error:
            raise TraceError(f"{path}: {str(error).splitlines()[0]}") from None
