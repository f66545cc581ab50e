"""Knowing the head of an HTTP message again, without parsing it.

On one connection nearly every message has the same head, byte for byte, but for the number after `content-length`. What
a parser once made of such a head holds for all that match it.
"""

from __future__ import annotations

import re

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})(?=\r\n)", re.IGNORECASE)
_MOST_BYTES = 4096  # a longer head is parsed each time: few have one, and it would be kept for each connection


class HeadPattern:
    """A head as it came; in those that match it, only the length may differ.

    Attributes
    ----------
    length
        Bytes that the last head that matched announced.
    """

    __slots__ = ("_after", "_before", "length")

    def __init__(self, before: bytes, after: bytes, length: int) -> None:
        self._before = before
        self._after = after
        self.length = length

    def body_begins(self, data: bytes) -> int:
        """Tell where the body begins if bytes begin with this head; -1 if with another, or with less than all of it."""
        if not data.startswith(self._before):
            return -1
        begins = len(self._before)
        ends = data.find(b"\r", begins, begins + 10)
        if ends < 0:
            return -1
        digits = data[begins:ends]
        if not digits.isdigit() or not data.startswith(self._after, ends):
            return -1
        self.length = int(digits)
        return ends + len(self._after)


def pattern_of(data: bytes) -> HeadPattern | None:
    """Return the pattern of the head that bytes begin with; None if they do not hold all of it, or no one length.

    Only for heads that a parser has taken: it is the one to judge whether they are well formed.
    """
    end = data.find(b"\r\n\r\n", 0, _MOST_BYTES)
    if end < 0:
        return None
    head = data[: end + 4]
    found = list(_LENGTH.finditer(head))
    if len(found) != 1:
        return None
    begins, ends = found[0].span(1)
    return HeadPattern(head[:begins], head[ends:], int(head[begins:ends]))
