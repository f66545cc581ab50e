"""Lines of files of any length, packed or not, whole or cut off in the middle."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from backends.validation import UsageError

Compression = Literal["none", "gzip", "zstd"]

MOST_LINE_BYTES = 256 * 2**20
"""A line longer than this is no record: what is binary has no ends of line at all."""

_CHUNK_BYTES = 1 << 14  # of unpacked data: what is lost, at most, before the place where a file is damaged


class TraceError(UsageError):
    """A trace that cannot be read or written; the message names the file, and the line where there is one."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no record.

    Parameters
    ----------
    number
        Counted from 1; of a file that is one JSON list, the number of its entry.
    """

    path: Path
    number: int
    why: str

    def __str__(self) -> str:
        """Return it as a compiler would."""
        return f"{self.path}:{self.number}: {self.why}"


Report = Callable[[BrokenLine], None]


class BrokenLines:
    """Counts broken lines and tells of the first few: a file of another kind has nothing else.

    Parameters
    ----------
    say
        Takes a line of text for a person.

    Attributes
    ----------
    count
        Broken lines so far.
    """

    SAID = 10

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.count = 0

    def __call__(self, broken: BrokenLine) -> None:
        """Take note of one."""
        self.count += 1
        if self.count <= self.SAID:
            self._say(f"{broken}; skipped")
        elif self.count == self.SAID + 1:
            self._say("More lines are broken; they are skipped and only counted.")


def refuse(broken: BrokenLine) -> None:
    """Raise for a broken line.

    Raises
    ------
    TraceError
        Always.
    """
    raise TraceError(str(broken))


def compression_of(path: Path) -> Compression:
    """Tell by its first bytes how a file is packed.

    Raises
    ------
    TraceError
        If it cannot be read.
    """
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
    """Open a file and unpack it as it is read; zstd may have many frames, as the recorder writes it."""
    packed = compression_of(path)
    with path.open("rb") as file:
        if packed == "gzip":
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], unpacked)
        elif packed == "zstd":
            yield cast(IO[bytes], io.BufferedReader(_Frames(file), _CHUNK_BYTES))
        else:
            yield file


def damages() -> tuple[type[Exception], ...]:
    """Return what is raised while a damaged file is read."""
    import zstandard

    return OSError, EOFError, zlib.error, zstandard.ZstdError


class _Frames(io.RawIOBase):
    """Unpacks zstd frames that stand one behind the other.

    zstandard's own reader takes a file that ends within a frame for one that ends there, and says nothing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._frame: Any = None  # what unpacks the frame under way
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._unpacked:
            self._packed = self._packed or self._file.read(_CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it was cut off within a zstd frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._unpacked = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


def numbered_lines(path: Path, report: Report) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers, in memory bounded by the longest of them.

    A file that is damaged or was cut off while it was written (its process was killed) is read up to there, and the
    damage reported as a broken line.

    Raises
    ------
    TraceError
        If the file cannot be opened.
    """
    number = 0
    with open_unpacked(path) as file:
        while True:
            try:
                line = file.readline(MOST_LINE_BYTES)
            except damages() as error:
                report(BrokenLine(path, number + 1, f"the file is damaged from here on: {error}"))
                return
            if not line:
                return
            number += 1
            if len(line) == MOST_LINE_BYTES:
                report(BrokenLine(path, number, f"longer than {MOST_LINE_BYTES >> 20} MiB: not a trace"))
                return
            if not line.isspace():
                yield number, line
