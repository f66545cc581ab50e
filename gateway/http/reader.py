"""Parses HTTP/1.1 requests from what a client sends, without I/O.

Clients tend to send the same head with each request. If all bytes match an earlier head of the connection, the reader
reuses its parsed form.
"""

from __future__ import annotations

from typing import Final

from backends.http.wire import HeadPattern, pattern_of
from gateway.http.chunks import ChunkedBody
from gateway.http.request_head import HeadLimits, RequestError, RequestHead, body_too_large, check_beginning, read_head

# What `RequestReader.next` returns.
NOTHING: Final = 0
"""More data is needed."""
BEGINNING: Final = 1
"""A head has begun but is not complete; returned once per head."""
HEAD: Final = 2
"""`head` is complete; its body follows."""
PART: Final = 3
"""More of the body, which is not complete."""
WHOLE: Final = 4
"""`body` is complete, and with it the request."""

_MAX_BLANK_LINES: Final = 4
"""Before a request; some clients send one after a body."""


class RequestReader:
    r"""The requests of a connection, one after another. It is unusable after an error.

    Examples
    --------
    >>> reader = RequestReader(HeadLimits(), 1000)
    >>> reader.feed(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\no")
    >>> reader.next() == HEAD, reader.head.target, reader.next() == PART, reader.next() == NOTHING
    (True, b'/a', True, True)
    >>> reader.feed(b"kGET")
    >>> reader.next() == WHOLE, reader.body, reader.next() == BEGINNING, reader.waiting_bytes()
    (True, b'ok', True, 3)
    """

    def __init__(self, limits: HeadLimits, most_body_bytes: int) -> None:
        self._limits = limits
        self._most_body_bytes = most_body_bytes
        self._data = b""  # received; what is before `_at` has been read
        self._at = 0
        self.head = RequestHead("GET", b"/", [])  # of the last request
        self.is_known = False  # whether its head matches the learned one
        self.is_reading_body = False  # whether its body is not complete
        self.body = b""  # of the last complete request
        self._missing_bytes = 0  # of the body
        self._so_far = bytearray()  # of the body
        self._is_first_part = False
        self._chunks: ChunkedBody | None = None  # a chunked body
        # seen, checked: bytes of an incomplete head that were there, and were checked, at the last look.
        self._seen_bytes = self._checked_bytes = 0
        self._blank_lines = 0
        self._pattern: HeadPattern | None = None
        self._known_head: RequestHead | None = None  # the head that matches the pattern
        self._unlearned = b""  # bytes of the last head, if it may be learned
        self._unknown_heads = 0  # in a row

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next(self) -> int:
        """Return the next event, `NOTHING` to `WHOLE`.

        Raises
        ------
        RequestError
            If it cannot be a request, or exceeds a limit. If `is_reading_body`, the body of `head` is at fault.
        """
        if self.is_reading_body:
            return self._read_body()
        while self._at < len(self._data):
            if self._is_known_head():
                return HEAD
            if not self._data.startswith(b"\r\n", self._at):
                return self._read_head()
            self._at += 2
            self._seen_bytes = 0  # of the empty line, if it arrived in parts
            self._blank_lines += 1
            if self._blank_lines > _MAX_BLANK_LINES:
                raise RequestError(400, "There are too many empty lines before the request.")
        self._data, self._at = b"", 0
        return NOTHING

    def learn(self) -> None:
        """Learn the last head, to recognize others like it.

        If all heads differ (by a request id, for example), it learns only one in 16, in case that changes.
        """
        data, self._unlearned = self._unlearned, b""
        if not data or (self._unknown_heads > 16 and self._unknown_heads % 16):
            return
        pattern = pattern_of(data)
        if pattern is not None:
            self._pattern, self._known_head = pattern, self.head

    def forget(self, most_body_bytes: int) -> None:
        """Forget the learned head, and bound the bodies of later requests."""
        self._known_head, self._most_body_bytes = None, most_body_bytes

    def waiting_bytes(self) -> int:
        """Return how many received bytes are unread; drop those read."""
        if self._at:
            self._data, self._at = self._data[self._at :], 0
        return len(self._data)

    def held_bytes(self) -> int:
        """Return how many bytes of incomplete requests are held."""
        return self.waiting_bytes() + len(self._so_far if self._chunks is None else self._chunks.data)

    def drop(self) -> None:
        """Drop what was received."""
        self._data, self._at = b"", 0
        self._so_far, self._chunks, self.is_reading_body = bytearray(), None, False

    def _is_known_head(self) -> bool:
        """Read a head that matches the learned one; return whether it did."""
        pattern, head = self._pattern, self._known_head
        if pattern is None or head is None:
            return False
        begins = pattern.body_begins(self._data, self._at)
        if begins < 0 or pattern.length > self._most_body_bytes:
            return False
        if (pattern.length > 0) is not (head.length > 0):  # the service may refuse a body
            return False
        self._unknown_heads = 0
        self.is_known = True
        self._begin_body(head, pattern.length, begins)
        return True

    def _read_head(self) -> int:
        """Read a head; refuse what it can before the head is complete."""
        data, at = self._data, self._at
        stop = data.find(b"\r\n\r\n", at + max(0, self._checked_bytes - 2))
        if stop < 0:
            waiting, seen = self.waiting_bytes(), self._seen_bytes
            if waiting == seen:
                return NOTHING
            self._checked_bytes = check_beginning(self._data, self._checked_bytes, seen, self._limits)
            self._seen_bytes = waiting
            return NOTHING if seen else BEGINNING
        head = read_head(data, at, stop + 4, self._limits)
        if head.length > self._most_body_bytes:
            self.head, self.is_reading_body = head, True
            raise body_too_large(self._most_body_bytes)
        if head.is_chunked:
            self._chunks = ChunkedBody(self._limits, self._most_body_bytes)
        self.is_known = False
        self._unknown_heads += 1
        self._begin_body(head, head.length, stop + 4)
        self._unlearned = data[at : stop + 4] if head.keep_alive and not head.expects_continue else b""
        return HEAD

    def _begin_body(self, head: RequestHead, length: int, begins: int) -> None:
        self.head, self._missing_bytes, self._at = head, length, begins
        self._seen_bytes = self._checked_bytes = self._blank_lines = 0
        self.is_reading_body = self._is_first_part = True

    def _read_body(self) -> int:
        data, at, chunks = self._data, self._at, self._chunks
        if chunks is not None:
            self._at = chunks.read(data, at)
            is_complete = chunks.is_complete
            if is_complete:
                self.body, self._chunks = bytes(chunks.data), None
        else:
            end = at + self._missing_bytes
            is_complete = end <= len(data)
            self._at = end if is_complete else len(data)
            if self._is_first_part and is_complete:
                self.body = data[at:end]
            else:
                self._so_far += data[at : self._at]
                self._missing_bytes -= self._at - at
                if is_complete:
                    self.body, self._so_far = bytes(self._so_far), bytearray()
        if is_complete:
            self.is_reading_body = False
            return WHOLE
        is_new = self._is_first_part or self._at > at
        self._is_first_part = False
        return PART if is_new else NOTHING
