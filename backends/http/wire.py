"""What both ends of HTTP/1.1 share: heads as bytes, repeated heads, and batched writes.

Nearly all messages on a connection have the same head, except for `content-length` and, in answers, `x-request-id`.
Parsing one such head gives the result for all that match it.

A write to a socket wakes the reader at the other end and evicts from the CPU's caches much of what the next request
needs. Consecutive writes wake a reader once for several requests and keep the caches warm. On one machine this saved
a tenth of the cost of relaying a request, and a quarter with much computation per request (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, Final

_now_s: Final = time.perf_counter
_running_loop: Final = asyncio.get_running_loop
_MOST_DIGITS: Final = 9
_MOST_ID_BYTES: Final = 256
_VARYING: Final = re.compile(
    rb"\r\n(?:content-length:[ \t]*(\d{1,%d})|x-request-id:[ \t]*([ -~]{1,%d}))(?=\r\n)"
    % (_MOST_DIGITS, _MOST_ID_BYTES),
    re.IGNORECASE,
)
_MAX_BYTES: Final = 4096  # longer heads are rare, and each connection keeps a pattern
MAX_WAIT_S = 0.00025
"""Seconds after which the next write flushes the batch, as an iteration of the event loop can be long."""


class HeadPattern:
    r"""The bytes of a message head, in which only the content length and request id may vary; see `pattern_of`.

    Examples
    --------
    >>> pattern = pattern_of(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: r1\r\n\r\nok", id_varies=True)
    >>> message = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-request-id: another\r\n\r\nhello"
    >>> message[pattern.body_begins(message) :], pattern.length
    (b'hello', 5)
    """

    def __init__(self, before: bytes, varying: list[tuple[bool, bytes]], length: int) -> None:
        self._before = before
        self._varying = varying  # of each value that varies: whether it is the content length, and the bytes after it
        self.length = length  # content length of the last head that matched, in bytes

    def body_begins(self, data: bytes, at: int = 0) -> int:
        """Return the offset of the body if a complete matching head starts at `at`, else -1."""
        end = at + len(self._before)
        if data[at:end] != self._before:  # when compiled, 4x as fast as `startswith`
            return -1
        length = 0
        for is_length, after in self._varying:
            begins = end
            if is_length:
                most = min(len(data), begins + _MOST_DIGITS)
                while end < most and 48 <= (digit := data[end]) <= 57:  # when compiled, 3x as fast as `int`
                    length, end = 10 * length + digit - 48, end + 1
            else:
                most = min(len(data), begins + _MOST_ID_BYTES)
                while end < most and 32 <= data[end] <= 126:
                    end += 1
            begins_after, end = end, end + len(after)
            if begins_after == begins or data[begins_after:end] != after:
                return -1
        self.length = length
        return end


def pattern_of(data: bytes, *, id_varies: bool = False) -> HeadPattern | None:
    """Return the pattern of the head at the start of `data`; None if it is incomplete or has not exactly one length.

    If `id_varies`, the value of `x-request-id` may be any text. Pass only heads that a parser has accepted: this
    function does not validate them.
    """
    end = data.find(b"\r\n\r\n", 0, _MAX_BYTES)
    if end < 0:
        return None
    head = data[: end + 4]
    found = [match for match in _VARYING.finditer(head) if match[1] or id_varies]
    lengths = [int(match[1]) for match in found if match[1]]
    if len(lengths) != 1:
        return None
    varying: list[tuple[bool, bytes]] = []
    rest = head
    for match in reversed(found):
        is_length = match[1] is not None
        begin, end = match.span(1 if is_length else 2)
        varying.insert(0, (is_length, rest[end:]))
        rest = head[:begin]
    return HeadPattern(rest, varying, lengths[0])


class WriteBatch:
    """Writes deferred, in order, to the end of the event loop iteration."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, bytes]] = []
        self._since_s = 0.0

    def add(self, transport: Any, data: bytes) -> None:
        """Write `data` at the end of the iteration, or now if the first write has waited for `MAX_WAIT_S`."""
        waiting = self._waiting
        waiting.append((transport, data))
        if len(waiting) == 1:
            self._since_s = _now_s()
            # Runs before the event loop polls the sockets again.
            _running_loop().call_soon(self.flush)
        elif _now_s() - self._since_s > MAX_WAIT_S:
            self.flush()

    def write_now(self, transport: Any, data: bytes) -> None:
        """Write now, after any waiting writes."""
        if self._waiting:
            self.flush()
        transport.write(data)

    def flush(self) -> None:
        """Write everything now, except to transports that have closed."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)


def request_head(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    r"""Return an HTTP/1.1 request line and headers, with the blank line that ends them.

    Examples
    --------
    >>> request_head(b"GET", b"/health", [(b"host", b"a")])
    b'GET /health HTTP/1.1\r\nhost: a\r\n\r\n'
    """
    parts = [method, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)
