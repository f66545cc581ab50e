"""The decoder of chunked request bodies: RFC 9112, section 7.1."""

from __future__ import annotations

import re
from typing import Final

from gateway.http.request_head import HeadLimits, RequestError, body_too_large, check_trailers

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t -~\x80-\xff]*)?\r\n")
_MAX_SIZE_LINE_BYTES = 256
_FRAMING_PER_BYTE = 16
"""Most bytes of chunk sizes and extensions per byte of the body, on top of what headers may have."""


class ChunkedBody:
    r"""A chunked body being read; extensions and trailers are checked and dropped.

    Examples
    --------
    >>> body = ChunkedBody(HeadLimits(), 100)
    >>> body.read(b"2\r\nab\r\n0\r\n\r\nGET /", 0), bytes(body.data), body.is_complete
    (12, b'ab', True)
    """

    def __init__(self, limits: HeadLimits, max_bytes: int) -> None:
        self._limits = limits
        self._max_bytes = max_bytes
        self._missing_bytes = 0  # of the current chunk and the line end after it; 0 before the size of a chunk
        self._framing_bytes = 0
        self._is_in_trailers = False
        self.data = bytearray()  # the body so far
        self.is_complete = False  # whether the body has ended

    def read(self, data: bytes, at: int) -> int:
        """Read what it can of `data[at:]`; return the offset of the rest, to be passed again with more data."""
        while not self.is_complete:
            if self._missing_bytes:
                after = self._read_chunk(data, at)
            elif self._is_in_trailers:
                after = self._read_trailers(data, at)
            else:
                after = self._read_size(data, at)
            if after == at:
                break
            at = after
        return at

    def _read_chunk(self, data: bytes, at: int) -> int:
        missing = self._missing_bytes
        if missing > 2:
            part = data[at : at + missing - 2]
            self.data += part
            self._missing_bytes = missing - len(part)
            return at + len(part)
        line_end = data[at : at + 2]
        if line_end == b"\r\n":
            self._missing_bytes = 0
            return at + 2
        if line_end in {b"", b"\r"}:
            return at
        raise RequestError(400, "A chunk is longer than its size.")

    def _read_size(self, data: bytes, at: int) -> int:
        match = _SIZE_LINE.match(data, at, at + _MAX_SIZE_LINE_BYTES)
        if match is None:
            if data.find(b"\n", at) >= 0 or len(data) - at >= _MAX_SIZE_LINE_BYTES:
                raise RequestError(400, "A chunk does not begin with a line that gives its size.")
            return at
        size = int(match[1], 16)
        if len(self.data) + size > self._max_bytes:
            raise body_too_large(self._max_bytes)
        self._framing_bytes += match.end() - at + 2
        if self._framing_bytes > _FRAMING_PER_BYTE * len(self.data) + self._limits.headers_bytes:
            raise RequestError(400, "The framing of the chunks is much larger than the body.")
        if size:
            self._missing_bytes = size + 2
        else:
            self._is_in_trailers = True
        return match.end()

    def _read_trailers(self, data: bytes, at: int) -> int:
        if data.startswith(b"\r\n", at):
            self.is_complete = True
            return at + 2
        stop = data.find(b"\r\n\r\n", at)
        if stop >= 0:
            check_trailers(data, at, stop + 2, self._limits)
            self.is_complete = True
            return stop + 4
        if len(data) - at > self._limits.headers_bytes:
            raise RequestError(431, f"The trailers are larger than {self._limits.headers_bytes} bytes.")
        return at
