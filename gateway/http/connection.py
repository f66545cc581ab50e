"""A connection of a client: its requests are read and answered one after another.

What a client sends while a request is answered waits unread. Clients tend to send the same head with each request: it
is compared with an earlier one of its connection, and if all bytes match, what was parsed then is used again.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Final

from backends.http.wire import HeadPattern, pattern_of
from gateway.http.chunks import ChunkedBody
from gateway.http.reply import Connection, HttpReply
from gateway.http.request_head import RequestError, RequestHead, body_too_large, check_beginning, read_head
from gateway.http.server import HttpServer

_MAX_BLANK_LINES: Final = 4
"""Before a request; some clients send one after a body."""
_MAX_WAITING_BYTES: Final = 2**16
"""What may wait behind a request that is being answered before reading pauses: a paused client is not seen to leave."""
_MAX_IN_A_ROW: Final = 16
"""Requests of a connection that are answered at once before others have their turn."""
_LINGER_S = 2.0
_BEGIN_S = 5.0
"""Seconds that a connection has to begin, or to complete a head, while the server is being stopped."""


class ServerConnection(Connection):
    """A connection of a client.

    It implements `asyncio.Protocol` without inheriting from it, so that mypyc can compile it.
    """

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.held_bytes = 0  # what the server has counted of this connection's unfinished request
        self.reply: HttpReply | None = None  # the current request: being read or answered
        self.is_new = True  # no head has been complete
        self.is_closing = False  # what is received is dropped
        self.since_s = 0.0  # when the connection became idle or closing, or the head or body that is being read began
        self._reader = RequestReader()
        self._transport: Any = None
        self._slow_since_s = 0.0  # when the client became too slow to receive; 0.0 if it is not

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        """Register the connection, or refuse it."""
        self._transport = transport
        self.since_s = time.monotonic()
        if self.server.register(self):
            return
        if self.server.is_overfull():
            self.abort()
        else:
            self._reader.refuse(self, 503, "The server has no room for another connection. Try again later.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the current answer, and break the reference cycles."""
        self.is_closing = True
        self.server.connections.discard(self)
        self._transport = None
        reply, self.reply = self.reply, None
        self._reader.drop(self)
        if reply is not None:
            reply.client_gone()

    def eof_received(self) -> bool:
        """Return False, so that the transport closes itself and calls `connection_lost`."""
        return False

    def pause_writing(self) -> None:
        """Pause the answer while the client is slow to receive it."""
        self._slow_since_s = time.monotonic()
        if self.reply is not None and (source := self.reply.source) is not None:
            source.pause()

    def resume_writing(self) -> None:
        """Resume the answer, or go on with requests that wait."""
        self._slow_since_s = 0.0
        if self.reply is not None:
            if (source := self.reply.source) is not None:
                source.resume()
        elif self._reader.pending:
            self._reader.read_later(self)

    def data_received(self, data: bytes) -> None:
        """Read requests, and have each handled as soon as it is complete."""
        if self.is_closing:
            return
        received = len(self._reader.pending)
        if received:
            data, self._reader.pending = self._reader.pending + data, b""
        self._reader.read(self, data, received)

    # Called by the reader

    def must_wait(self) -> bool:
        """Return whether the next request has to wait for the current one, or for the client to receive its answer."""
        return self.reply is not None or self._slow_since_s != 0.0

    def pause_reading(self, *, is_paused: bool) -> None:
        """Stop reading from the client, or go on."""
        if is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # Called by replies

    def preamble(self) -> bytes:
        """Return the header lines of every answer."""
        return self.server.preamble()

    def write(self, data: bytes) -> None:
        """Write at the end of the event loop's iteration."""
        if self._transport is not None:
            if (writes := self.server.writes) is not None:
                writes.add(self._transport, data)
            else:
                self._transport.write(data)

    def write_now(self, data: bytes) -> None:
        """Write now, as for a chunk of a stream."""
        if self._transport is not None:
            if (writes := self.server.writes) is not None:
                writes.write_now(self._transport, data)
            else:
                self._transport.write(data)

    def answered(self, reply: HttpReply) -> None:
        """Go on with the next request, or close."""
        if self._transport is None:
            return
        self.reply = None
        if not reply.keep_alive:
            self._close(lingers=not reply.is_complete)
            return
        self.since_s = time.monotonic()
        if self._reader.pending:  # not while it reads
            self._reader.read_later(self)

    def _close(self, *, lingers: bool) -> None:
        """Close; in a while if the client is still sending, since it might not read the answer otherwise."""
        self.is_closing = True
        self.since_s = time.monotonic()
        self._reader.drop(self)
        self._reader.pause(self, is_paused=False)
        if not lingers:
            self.server.close(self._transport)

    # Called by the server

    def shutdown(self) -> None:
        """Close the connection once the current request has been answered, or one that may be on its way."""
        self.server.is_stopping = True
        if self.reply is not None:
            self.reply.keep_alive = False
        elif self._transport is not None and not self.is_closing:
            may_begin = (self.is_new or self._reader.pending) and time.monotonic() - self.since_s < _BEGIN_S
            if not may_begin:
                self._close(lingers=False)

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_closing = True
        self._reader.drop(self)
        if self._transport is not None:
            self._transport.abort()

    def shed(self) -> None:
        """Refuse the unfinished request, or disconnect a client that sends more than is answered."""
        if self.reply is self._reader.reading:  # no complete request is being answered
            self._reader.refuse(self, 503, "The server holds too many unfinished requests. Send the request again.")
        else:
            self.abort()

    def forget_head(self) -> None:
        """Ask the service about the next request, even if it has the head of an earlier one."""
        self._reader.known_head = None

    def idle_since_s(self) -> float:
        """Return since when the next request, or the rest of its head, is waited for; infinity while none is."""
        return self.since_s if self.reply is None and self._transport is not None else math.inf

    def check(self, now_s: float) -> None:
        """Close the connection if its client has taken too long."""
        server, transport, reader, taken_s = self.server, self._transport, self._reader, now_s - self.since_s
        limits = server.limits
        if transport is None:
            return
        if self.is_closing:
            if taken_s > _LINGER_S + limits.stall_s:
                transport.abort()
            elif taken_s > _LINGER_S:
                server.close(transport)
        elif self._slow_since_s:
            if now_s - self._slow_since_s > limits.stall_s:
                self.abort()
        elif reader.reading is not None:
            if taken_s > limits.body_s or now_s - reader.read_s > limits.stall_s:
                reader.refuse(self, 408, "The body of the request did not arrive in time.")
        elif self.reply is not None:
            return
        elif reader.pending and not server.is_stopping:
            if taken_s > limits.head_s:
                reader.refuse(self, 408, "The head of the request did not arrive in time.")
        elif taken_s > (_BEGIN_S if server.is_stopping else limits.head_s if self.is_new else limits.idle_s):
            self._close(lingers=False)


class RequestReader:
    """The requests of a connection, while they are being read.

    It is told the connection with each call: if it had it, closed connections would wait for the garbage collector.
    """

    def __init__(self) -> None:
        self.reading: HttpReply | None = None  # the current request, until its body is complete
        self.pending = b""  # received, but no whole head or chunk size yet, or behind the current request
        self.read_s = 0.0  # the last time that something of a body came
        self._missing_bytes = 0  # of its body
        self._body = bytearray()  # of its body, without the part that comes last
        self._chunks: ChunkedBody | None = None  # the same of a chunked body
        self._checked_bytes = 0  # of a head in `pending`
        self._blank_lines = 0
        self._is_paused = False  # reading is
        self._pattern: HeadPattern | None = None
        self.known_head: RequestHead | None = None  # the head that has the pattern
        self._unknown_heads = 0  # in a row

    def read(self, connection: ServerConnection, data: bytes, received: int) -> None:
        """Read what there is, and keep the rest; the first `received` bytes have been here before."""
        at, size, count = 0, len(data), 0
        must_wait = False
        while at < size:
            if self.reading is not None:
                after = self._read_body(connection, data, at)
            elif count == _MAX_IN_A_ROW or connection.must_wait():
                must_wait = True
                break
            else:
                count += 1
                after = self._read_head(connection, data, at, received)
            if connection.is_closing:
                return
            if after == at:
                break
            at, received = after, 0
        if at < size:
            self.pending = data[at:] if at else data
            self.pause(connection, is_paused=must_wait and (self._is_paused or size - at > _MAX_WAITING_BYTES))
            if count == _MAX_IN_A_ROW and connection.reply is None:
                self.read_later(connection)
        else:
            self.pause(connection, is_paused=False)
        if self.reading is not None or self.pending or connection.held_bytes:
            held = self._body if self._chunks is None else self._chunks.data
            connection.server.hold(connection, len(self.pending) + len(held))

    def pause(self, connection: ServerConnection, *, is_paused: bool) -> None:
        """Stop reading from the client, or go on."""
        if is_paused is not self._is_paused:
            self._is_paused = is_paused
            connection.pause_reading(is_paused=is_paused)

    def read_later(self, connection: ServerConnection) -> None:
        """Read what waits in a turn of its own."""
        asyncio.get_running_loop().call_soon(self._read_pending, connection)

    def _read_pending(self, connection: ServerConnection) -> None:
        if self.pending and not connection.is_closing:
            data, self.pending = self.pending, b""
            self.read(connection, data, 0)

    def _read_head(self, connection: ServerConnection, data: bytes, at: int, received: int) -> int:
        """Begin a request, and return the offset after what was read of it; `at` if its head is not complete."""
        pattern = self._pattern
        limits = connection.server.limits
        if pattern is not None and self.known_head is not None:
            begins = pattern.body_begins(data, at)
            if begins >= 0 and pattern.length <= limits.body_bytes:
                self._unknown_heads = self._blank_lines = self._checked_bytes = 0
                is_last = connection.server.is_stopping
                reply = HttpReply(connection, self.known_head, is_last=is_last, is_admitted=True)
                return self._begin(connection, reply, pattern.length, data, begins)
        if data.startswith(b"\r\n", at):
            self._blank_lines += 1
            if self._blank_lines > _MAX_BLANK_LINES:
                self.refuse(connection, 400, "There are too many empty lines before the request.")
            return at + 2
        try:
            stop = data.find(b"\r\n\r\n", at + max(0, self._checked_bytes - 2))
            if stop < 0:
                if not received:
                    connection.since_s = time.monotonic()
                self._checked_bytes = check_beginning(data[at:], self._checked_bytes, received, limits.head)
                return at
            request = read_head(data, at, stop + 4, limits.head)
            if request.length > limits.body_bytes:
                self.reading = HttpReply(connection, request, is_last=connection.server.is_stopping)
                raise body_too_large(limits.body_bytes)
        except RequestError as error:
            self.refuse(connection, error.status, error.reason)
            return at
        connection.is_new = False
        self._blank_lines = self._checked_bytes = 0
        if request.is_chunked:
            self._chunks = ChunkedBody(limits.head, limits.body_bytes)
        reply = HttpReply(connection, request, is_last=connection.server.is_stopping)
        after = self._begin(connection, reply, request.length, data, stop + 4)
        if reply.is_admitted:
            self._learn_head(data, at, request)
        return after

    def _begin(self, connection: ServerConnection, reply: HttpReply, length: int, data: bytes, at: int) -> int:
        """Begin a request whose body begins at `at`, and return the offset after what is there of it."""
        connection.reply = reply
        end = at + length
        if end <= len(data) and self._chunks is None:
            self._handle(connection, reply, data[at:end])
            return end
        self.reading = reply
        self._missing_bytes = length
        connection.since_s = time.monotonic()
        return self._read_body(connection, data, at)

    def _read_body(self, connection: ServerConnection, data: bytes, at: int) -> int:
        """Read what is there of the body, and return the offset after it."""
        reply, chunks = self.reading, self._chunks
        assert reply is not None
        if chunks is not None:
            try:
                at = chunks.read(data, at)
            except RequestError as error:
                self.refuse(connection, error.status, error.reason)
                return at
            is_complete, body = chunks.is_complete, chunks.data
        else:
            part = data[at : at + self._missing_bytes]
            at += len(part)
            self._missing_bytes -= len(part)
            body = self._body
            body += part
            is_complete = not self._missing_bytes
        if is_complete:
            self.reading = self._chunks = None
            self._body = bytearray()
            self._handle(connection, reply, bytes(body))
            return at
        self.read_s = time.monotonic()
        if not reply.is_admitted and self._admit(connection, reply) and reply.request.expects_continue:
            connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return at

    def _admit(self, connection: ServerConnection, reply: HttpReply) -> bool:
        connection.server.service.admit(reply)
        reply.is_admitted = not reply.has_ended
        return reply.is_admitted

    def _handle(self, connection: ServerConnection, reply: HttpReply, body: bytes) -> None:
        reply.is_complete = True
        if reply.is_admitted or self._admit(connection, reply):
            connection.server.service.handle(reply, body)

    def drop(self, connection: ServerConnection) -> None:
        """Drop what has been read."""
        self.reading = self._chunks = None
        self.pending = b""
        self._body = bytearray()
        if connection.held_bytes:
            connection.server.hold(connection, 0)

    def refuse(self, connection: ServerConnection, status: int, reason: str) -> None:
        """Refuse what is being read, and close the connection."""
        reply = self.reading
        if reply is None:
            reply = HttpReply(connection, RequestHead("GET", b"/", []), is_last=True)
        connection.reply = reply
        self.drop(connection)
        connection.server.service.refuse(reply, status, reason)

    def _learn_head(self, data: bytes, at: int, request: RequestHead) -> None:
        """Remember the head of a request, which begins at `at`.

        If all heads differ (by a request id, for example), only one in 16 is remembered, in case that changes.
        """
        self._unknown_heads += 1
        if (
            request.expects_continue
            or not request.keep_alive
            or (self._unknown_heads > 16 and self._unknown_heads % 16)
        ):
            return
        pattern = pattern_of(data[at:] if at else data)
        if pattern is not None:
            self._pattern, self.known_head = pattern, request
