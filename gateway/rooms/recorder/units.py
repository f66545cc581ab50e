"""Splits texts into units, similar to a vocabulary's tokens: words, numbers of up to three digits, marks, blanks.

The units are the matches of ` ?[letters_]+| ?[0-9]{1,3}| ?[marks]+|[blanks]+` in UTF-8. Characters beyond ASCII are
classified by block: each Chinese, Japanese or Korean character is a unit; punctuation, symbols, full-width forms and
emoji are marks; all others are letters. `_units.c` does the same by the table `KINDS`.
"""

from __future__ import annotations

import re
from typing import Final

_BLANK, _OTHER_BLANK, _LETTER, _DIGIT, _MARK, _END, _ALONE, _CONTINUED = 0, 1, 2, 4, 6, 8, 10, 12
"""Classes of bytes; the two kinds of blanks differ only in the lowest bit, which does not separate units."""

_TEXT_END = 0xFF  # does not occur in UTF-8


def cut(text: str) -> list[bytes]:
    """Return the units of a text, in UTF-8.

    Examples
    --------
    >>> cut("Hello, world 1234")
    [b'Hello', b',', b' world', b' 123', b'4']
    """
    return _UNITS.findall(text.encode("utf-8", "surrogatepass"))


def _table() -> bytes:
    kinds = bytearray(256)
    for byte in range(128):
        sign = chr(byte)
        if sign.isspace():
            kinds[byte] = _BLANK if sign == " " else _OTHER_BLANK
        elif sign.isalpha() or sign == "_":
            kinds[byte] = _LETTER
        else:
            kinds[byte] = _DIGIT if sign.isdigit() else _MARK
    for byte in range(0x80, 0xC0):
        kinds[byte] = _CONTINUED
    for byte in range(0xC0, 0xE2):
        kinds[byte] = _LETTER
    for byte in range(0xE3, 0xEE):
        kinds[byte] = _ALONE
    for byte in (0xC2, 0xE2, *range(0xEE, 0xFF)):  # Latin-1 symbols, U+2000 to U+2FFF, U+E000 and above, emoji
        kinds[byte] = _MARK
    kinds[_TEXT_END] = _END
    return bytes(kinds)


KINDS: Final = _table()
"""The class of each of the 256 bytes."""


def _expression() -> re.Pattern[bytes]:
    def one_of(*kinds: int) -> bytes:
        return b"[" + b"".join(b"\\x%02x" % byte for byte in range(256) if KINDS[byte] in kinds) + b"]"

    rest = one_of(_CONTINUED) + b"*"
    letters, marks = (b"(?:" + one_of(kind) + rest + b")+" for kind in (_LETTER, _MARK))
    units = (letters, one_of(_DIGIT) + b"{1,3}", one_of(_ALONE) + rest, marks)
    return re.compile(b"|".join([*(b" ?" + unit for unit in units), one_of(_BLANK, _OTHER_BLANK) + b"+"]))


_UNITS: Final = _expression()
