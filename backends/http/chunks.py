"""Chunks of an answer that need no parser: those of a stream that come one in a read, as most do."""

from __future__ import annotations

from typing import Final


class ChunkReader:
    r"""Reads what is exactly one chunk while its parser, whose protocol it is, is between two of them.

    Examples
    --------
    >>> reader = ChunkReader()
    >>> reader.on_chunk_complete()
    >>> reader.parsed(b"2\r\nab\r\n")
    >>> reader.only_chunk(b"A\r\n0123456789\r\n"), reader.only_chunk(b"2\r\nab\r\n0\r\n\r\n")
    (b'0123456789', None)
    """

    def __init__(self) -> None:
        self._is_between = False  # nothing of the next chunk has been parsed

    def on_chunk_header(self) -> None:
        """Note that a chunk has begun, or the end after the last one."""
        self._is_between = False

    def on_chunk_complete(self) -> None:
        """Note that a chunk has ended."""
        self._is_between = True

    def parsed(self, data: bytes) -> None:
        """Note what was parsed last: part of a line with a size may follow the last chunk in it."""
        self._is_between = self._is_between and data[-2:] == _LINE_END

    def only_chunk(self, data: bytes) -> bytes | None:
        """Return the content of data that is exactly one chunk, without extensions; None for all else."""
        if not self._is_between:
            return None
        size, at, most = 0, 0, min(len(data), _MOST_DIGITS)
        while at < most and (digit := _DIGITS[data[at]]) >= 0:
            size, at = 16 * size + digit, at + 1
        begins = at + 2
        ends = begins + size
        if size == 0 or len(data) != ends + 2 or data[at:begins] != _LINE_END or data[ends:] != _LINE_END:
            return None
        return data[begins:ends]


_LINE_END: Final = b"\r\n"
_MOST_DIGITS: Final = 4  # larger ones are rare, and are parsed in parts, so that other connections have their turn
_DIGITS: Final = [int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else -1 for byte in range(256)]
