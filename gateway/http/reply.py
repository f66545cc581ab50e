"""The reply to a request, and its connection as the reply and the server see it."""

from __future__ import annotations

import socket
import struct
import time
from abc import ABC, abstractmethod
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Protocol

from backends.http.wire import WriteBatch
from gateway.http.request_head import RequestHead

_now_s: Final = time.time
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 1000)
}
_SIZES: Final = [b"%x" % size for size in range(2**10)]  # precomputed, since a stream has many chunks
_NO_BODY_STATUSES: Final = frozenset({204, 304})
_RESET: Final = struct.pack("ii", 1, 0)
_LEAST_RECEIVED_BYTES: Final = 2**14
"""A slow client that receives less than this makes no progress."""


class Source(Protocol):
    """What produces the answer to a request."""

    def client_gone(self) -> None:
        """Stop: the client has disconnected."""

    def pause(self) -> None:
        """Pause while the client is slow to receive."""

    def resume(self) -> None:
        """Resume."""


class DateLine:
    """The `date` header line of every answer, formatted once a second."""

    def __init__(self) -> None:
        self._line = b""
        self._until_s = 0.0

    def now(self) -> bytes:
        """Return the line for the current second."""
        now_s = _now_s()
        if not 0.0 < self._until_s - now_s <= 1.0:
            self._line = f"date: {formatdate(now_s, usegmt=True)}\r\n".encode("ascii")
            self._until_s = float(int(now_s)) + 1.0
        return self._line


class Connection(ABC):
    """A client connection as replies and the server see it: its writing half; a subclass reads."""

    def __init__(self, writes: WriteBatch, date: DateLine) -> None:
        self.date = date
        self.held_bytes = 0  # bytes of its unfinished request
        self.reply: HttpReply | None = None  # the current request: being read or answered
        self._writes = writes  # batches the writes of whole answers
        self._transport: Any = None
        self._is_paused = False  # reading from the client is paused
        # When a slow client became slow, or last received some of the unsent bytes; 0.0 if it is not slow.
        self._slow_since_s = 0.0
        self._unsent_bytes = 0

    # Called by asyncio

    def eof_received(self) -> bool:
        """Return False, so that the transport closes itself and calls `connection_lost`."""
        return False

    def pause_writing(self) -> None:
        """Pause the answer while the client is slow to receive it."""
        self._slow_since_s, self._unsent_bytes = time.monotonic(), self._transport.get_write_buffer_size()
        if self.reply is not None and (source := self.reply.source) is not None:
            source.pause()

    def receives_nothing_s(self, now_s: float) -> float:
        """Return the seconds for which a slow client has made no progress."""
        if (unsent_bytes := self._transport.get_write_buffer_size()) <= self._unsent_bytes - _LEAST_RECEIVED_BYTES:
            self._slow_since_s, self._unsent_bytes = now_s, unsent_bytes
        return now_s - self._slow_since_s

    # Called by replies

    def write(self, data: bytes) -> None:
        """Write at the end of the event loop's iteration."""
        if self._transport is not None:
            self._writes.add(self._transport, data)

    def write_now(self, data: bytes) -> None:
        """Write now, as for a chunk of a stream."""
        if self._transport is not None:
            self._writes.write_now(self._transport, data)

    def pause_reading(self, *, is_paused: bool) -> None:
        """Pause or resume reading from the client."""
        if is_paused is not self._is_paused:
            self._is_paused = is_paused
            if is_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def reset(self) -> None:
        """Close the connection immediately and not plainly: with HTTP/1.0, half an answer would look complete."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None:  # it is None once TLS has lost its connection
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.abort()

    @abstractmethod
    def answered(self, reply: HttpReply) -> None:
        """Continue with the next request, or close."""

    # Called by the server

    @abstractmethod
    def abort(self) -> None:
        """Close the connection immediately."""

    @abstractmethod
    def shed(self) -> None:
        """Refuse the unfinished request, or disconnect a client that sends ahead of its answers."""

    @abstractmethod
    def shutdown(self) -> None:
        """Close the connection once the current request, or one that may be on its way, has been answered."""

    @abstractmethod
    def follow_limits(self) -> None:
        """Bound the next request by the current limits, and ask the service about it even if its head is known."""

    @abstractmethod
    def idle_since_s(self) -> float:
        """Return since when it has waited for a request, or the rest of its head; infinity if it does not wait."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Close the connection if its client has taken too long."""


class HttpReply:
    """One request and the reply to it: either `whole`, or `head`, any number of `data`, and `end`."""

    def __init__(
        self, connection: Connection, request: RequestHead, *, is_last: bool, is_admitted: bool = False
    ) -> None:
        self._connection = connection
        self._chunked = request.is_http_1_1
        self._head = b""
        self._is_head = request.method == "HEAD"  # whose answer has no body
        # Whether the service has admitted the head; once is enough for all requests with the same head.
        self.is_admitted = is_admitted
        self.request = request
        self.source: Source | None = None  # what produces the answer; None before and after
        self.keep_alive = request.keep_alive and not is_last
        self.is_complete = False  # whether the request has been read completely
        self.has_ended = False  # whether the answer has ended or been aborted, or the client has disconnected

    # Called by the service and the source of the answer

    def answered_by(self, source: Source) -> None:
        """Set the source of the answer."""
        if not self.has_ended:
            self.source = source

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer; the head is written together with the first bytes of the body."""
        head = _STATUS_LINES[status] + self._connection.date.now() + lines
        if self._is_head or status in _NO_BODY_STATUSES or b"\r\ncontent-length: " in head:
            self._chunked = False
        elif self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        self._head = head + self._close_line() + b"\r\n"

    def data(self, chunk: bytes) -> None:
        """Send bytes of the body."""
        if self._is_head or not chunk:
            return
        head, self._head = self._head, b""
        size = _SIZES[len(chunk)] if len(chunk) < len(_SIZES) else b"%x" % len(chunk)
        self._connection.write_now(b"%b%b\r\n%b\r\n" % (head, size, chunk) if self._chunked else head + chunk)

    def end(self) -> None:
        """End the answer."""
        rest = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if rest:
            self._connection.write_now(rest)
        self._finish()

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a complete answer in one write; `lines` lack its content length."""
        if status in _NO_BODY_STATUSES:
            self.head(status, lines)
            self.end()
            return
        sent = b"" if self._is_head else body
        date, close = self._connection.date.now(), self._close_line()
        self._connection.write(
            b"%b%b%b%bcontent-length: %d\r\n\r\n%b" % (_STATUS_LINES[status], date, lines, close, len(body), sent)
        )
        self._finish()

    def abort(self) -> None:
        """Close the connection before the end of the answer."""
        self.has_ended = True
        self.source = None
        self._connection.reset()

    def _close_line(self) -> bytes:
        if not self.is_complete:
            self.keep_alive = False  # rather than read the rest of the request
        return b"" if self.keep_alive else b"connection: close\r\n"

    def _finish(self) -> None:
        self.has_ended = True
        self.source = None  # breaks a reference cycle, which would wait for the garbage collector
        self._connection.answered(self)

    # Called by the connection

    def client_gone(self) -> None:
        """Stop the source of the answer."""
        self.has_ended = True
        source, self.source = self.source, None
        if source is not None:
            source.client_gone()
