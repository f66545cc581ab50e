"""Recognition of repeated HTTP message heads, which need not be parsed again.

Nearly all messages on a connection have the same head, except for the value of `content-length`. The result of parsing
one such head is valid for all that match it.
"""

from __future__ import annotations

import re

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})(?=\r\n)", re.IGNORECASE)
_MAX_BYTES = 4096  # longer heads are rare, and a pattern is kept for each connection


class HeadPattern:
    r"""The bytes of a message head in which only the content length may differ; see `pattern_of`.

    Examples
    --------
    >>> pattern = pattern_of(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    >>> message = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    >>> message[pattern.body_begins(message) :], pattern.length
    (b'hello', 5)
    """

    __slots__ = ("_after", "_before", "length")

    def __init__(self, before: bytes, after: bytes, length: int) -> None:
        self._before = before
        self._after = after
        self.length = length  # content length of the last head that matched, in bytes

    def body_begins(self, data: bytes, at: int = 0) -> int:
        """Return the offset of the body if a complete head that matches begins at `at`, else -1."""
        if not data.startswith(self._before, at):
            return -1
        start = at + len(self._before)
        end = data.find(b"\r", start, start + 10)
        if end < 0:
            return -1
        digits = data[start:end]
        if not digits.isdigit() or not data.startswith(self._after, end):
            return -1
        self.length = int(digits)
        return end + len(self._after)


def pattern_of(data: bytes) -> HeadPattern | None:
    """Return the pattern of the head at the start of `data`; None if it is incomplete or has not exactly one length.

    Only for heads that a parser has accepted: their validity is not checked here.
    """
    end = data.find(b"\r\n\r\n", 0, _MAX_BYTES)
    if end < 0:
        return None
    head = data[: end + 4]
    lengths = list(_LENGTH.finditer(head))
    if len(lengths) != 1:
        return None
    start, stop = lengths[0].span(1)
    return HeadPattern(head[:start], head[stop:], int(head[start:stop]))
