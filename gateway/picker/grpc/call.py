"""One call of gRPC, which is one stream of HTTP/2: messages over frames, and frames over messages."""

from __future__ import annotations

import logging
import time
from collections import deque
from struct import Struct
from typing import Final, Protocol

from gateway.picker.grpc.frames import (
    ANSWER_HEAD,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    HEAD,
    HEADERS,
    NO_ERROR,
    RST_STREAM,
    WINDOW_UPDATE,
    StreamError,
    frame,
    number,
    trailers,
)

log = logging.getLogger(__name__)

OK: Final = 0
INVALID_ARGUMENT: Final = 3
NOT_FOUND: Final = 5
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

WINDOW_BYTES: Final = 1 << 20
"""What a peer may send of a call before more is asked for."""
MESSAGE_BYTES: Final = 4 << 20
"""Longest message that is received, as of gRPC by default; a proxy sends the body of a request in much smaller ones."""
MOST_HELD_BYTES: Final = 16 << 20
"""What a connection may hold of incomplete messages; the call that has more is ended."""
MOST_UNSENT_BYTES: Final = 1 << 20
"""What may wait to be sent before no more is asked for."""

_PREFIX: Final = Struct(">BI")
_FRAMED_MESSAGE: Final = Struct(">IBIBI")
_SUCCESS: Final = trailers(OK, "")


class Handler(Protocol):
    """What answers a call."""

    def handle(self, message: bytes | bytearray) -> None:
        """Handle a message of the client."""

    def half_close(self) -> None:
        """Handle that the client has no more messages."""

    def close(self) -> None:
        """Handle the end of the call: answered, cancelled, or its connection lost."""


class Line(Protocol):
    """What a call needs of its connection."""

    send_window: int
    held_bytes: int
    is_slow: bool

    def write(self, data: bytes | memoryview) -> None:
        """Write at the end of the turn."""

    def wait(self, call: Call, unsent_bytes: int) -> None:
        """Count more, or less, bytes of a call that wait for room."""

    def answered(self, call: Call) -> None:
        """Forget a call, of which everything has been written."""


class Call:
    """A call, as its handler sees it and as its connection does."""

    __slots__ = (
        "_ending",
        "_line",
        "_message",
        "_missing_bytes",
        "_offset",
        "_prefix",
        "_receive_window",
        "_unsent",
        "handler",
        "has_begun",
        "has_ended",
        "id",
        "is_half_closed",
        "messages",
        "send_window",
        "unsent_bytes",
        "waits_since_s",
    )

    def __init__(self, line: Line, stream: int, send_window: int) -> None:
        self._line = line
        self.id = stream
        self.handler: Handler | None = None
        self.send_window = send_window  # what the client accepts now
        self._receive_window = WINDOW_BYTES
        self._prefix = b""  # of a message, as long as it is incomplete
        self._message = bytearray()  # the same, of what follows
        self._missing_bytes = 0
        self._unsent: deque[memoryview] | None = None
        self._offset = 0  # in the first of them
        self._ending = b""
        self.unsent_bytes = 0  # what waits because the client does not accept it yet
        self.waits_since_s = 0.0  # since when nothing of that could be sent, on the monotonic clock
        self.messages = 0  # how many messages have been received
        self.has_begun = False
        self.is_half_closed = False  # whether the client has no more messages
        self.has_ended = False  # whether nothing more can be sent

    # Called by the handler

    def send(self, message: bytes) -> None:
        """Send a message, after those before."""
        if self.has_ended:
            return
        line, size = self._line, len(message) + 5
        self._begin()
        if self._unsent or line.is_slow or size > FRAME_BYTES or size > self.send_window or size > line.send_window:
            self._queue(_PREFIX.pack(0, size - 5), message)
            return
        self.send_window -= size
        line.send_window -= size
        line.write(_FRAMED_MESSAGE.pack(size << 8 | DATA, 0, self.id, 0, size - 5) + message)

    def end(self) -> None:
        """End the call well, after all messages."""
        self._end_with(_SUCCESS)

    def fail(self, status: int, text: str) -> None:
        """End the call with a status of gRPC that is not 0."""
        self._end_with(trailers(status, text))

    def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._line.write(frame(HEADERS, END_HEADERS, self.id, ANSWER_HEAD))

    def _end_with(self, block: bytes) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        if not self.has_begun:
            block = ANSWER_HEAD + block
        self._ending = frame(HEADERS, END_HEADERS | END_STREAM, self.id, block)
        if not self._unsent:
            self._finish()

    def _finish(self) -> None:
        """Write the trailers, and have a client stop that has not ended."""
        ending = self._ending
        self._line.write(ending if self.is_half_closed else ending + frame(RST_STREAM, 0, self.id, number(NO_ERROR)))
        self._line.answered(self)

    # Sending

    def _queue(self, prefix: bytes, message: bytes) -> None:
        if self._unsent is None:
            self._unsent = deque()
        if not self._unsent:
            self.waits_since_s = time.monotonic()
        size = len(prefix) + len(message)
        self._unsent.append(memoryview(prefix))
        if message:
            self._unsent.append(memoryview(message))
        self.unsent_bytes += size
        self._line.wait(self, size)
        self.pump()

    def pump(self) -> None:
        """Send of what waits as much as the client accepts."""
        line, unsent = self._line, self._unsent
        if unsent is None:
            return
        before = self.unsent_bytes
        while self.unsent_bytes and not line.is_slow:
            size = min(self.unsent_bytes, FRAME_BYTES, self.send_window, line.send_window)
            if size <= 0:
                break
            self.send_window -= size
            line.send_window -= size
            self.unsent_bytes -= size
            line.write(HEAD.pack(size << 8 | DATA, 0, self.id))
            while size:
                part = unsent[0][self._offset : self._offset + size]
                line.write(part)
                size -= len(part)
                self._offset += len(part)
                if self._offset == len(unsent[0]):
                    unsent.popleft()
                    self._offset = 0
        if self.unsent_bytes < before:
            self.waits_since_s = time.monotonic()
            line.wait(self, self.unsent_bytes - before)
            self._ask_for_more()
        if self.has_ended and not unsent:
            self._finish()

    # Called by the connection

    def receive(self, data: bytes, at: int, end: int, frame_bytes: int) -> None:
        """Handle what a frame has of messages."""
        self._receive_window -= frame_bytes
        if self._receive_window < 0:
            raise StreamError(FLOW_CONTROL_ERROR)
        while at < end and not self.has_ended:
            if self._missing_bytes:
                size = min(end - at, self._missing_bytes)
                self._message += memoryview(data)[at : at + size]  # copied once
                at += size
                self._missing_bytes -= size
                self._line.held_bytes += size
                if not self._missing_bytes:
                    message, self._message = self._message, bytearray()
                    self._line.held_bytes -= len(message)
                    self._handle(message)
                elif self._line.held_bytes > MOST_HELD_BYTES:
                    raise StreamError(ENHANCE_YOUR_CALM)
                continue
            if self._prefix or end - at < 5:
                part = data[at : min(end, at + 5 - len(self._prefix))]
                at += len(part)
                self._prefix += part
                if len(self._prefix) < 5:
                    break
                size = self._size_of(self._prefix, 0)
                self._prefix = b""
            else:
                size = self._size_of(data, at)
                at += 5
            if self.has_ended:
                break
            if end - at >= size:
                at += size
                self._handle(data[at - size : at])
            else:
                self._missing_bytes = size
        self._ask_for_more()

    def _size_of(self, data: bytes, at: int) -> int:
        """Return the size of the message whose prefix is at an offset; end the call if it is none to be received."""
        is_compressed, size = _PREFIX.unpack_from(data, at)
        if is_compressed:
            self.fail(UNIMPLEMENTED, "Messages must not be compressed.")
        elif size > MESSAGE_BYTES:
            self.fail(RESOURCE_EXHAUSTED, f"A message has {size} bytes; at most {MESSAGE_BYTES} are accepted.")
        return int(size)

    def _handle(self, message: bytes | bytearray) -> None:
        self.messages += 1
        if self.handler is None:
            return
        try:
            self.handler.handle(message)
        except Exception:
            log.exception("a message of a call could not be handled")
            self.fail(INTERNAL, "The message could not be handled.")

    def half_close(self) -> None:
        """Handle that the client has no more messages."""
        self.is_half_closed = True
        if self.has_ended:
            return
        if self._prefix or self._missing_bytes:
            self.fail(INTERNAL, "The call ended within a message.")
        elif self.handler is not None:
            self.handler.half_close()

    def _ask_for_more(self) -> None:
        """Open the receive window again, unless the client is slow to receive."""
        room = self._receive_window
        if room > WINDOW_BYTES // 2 or self.unsent_bytes > MOST_UNSENT_BYTES or self.is_half_closed or self.has_ended:
            return
        self._receive_window = WINDOW_BYTES
        self._line.write(frame(WINDOW_UPDATE, 0, self.id, number(WINDOW_BYTES - room)))

    def drop(self) -> None:
        """Forget what waits, and tell the handler that the call has ended."""
        self.has_ended = True
        unsent_bytes, self.unsent_bytes = self.unsent_bytes, 0
        if unsent_bytes:
            self._line.wait(self, -unsent_bytes)
        self._unsent = None
        self._line.held_bytes -= len(self._message)
        self._message = bytearray()
        handler, self.handler = self.handler, None
        if handler is not None:
            try:
                handler.close()
            except Exception:
                log.exception("the end of a call could not be handled")
