"""An HTTP/1.1 server over asyncio protocols.

A complete request goes to a `Service` in the call that read its last byte, and the answer is written to the socket in
the call that made it: no task, no queue. Each connection has one request at a time; what a client sends meanwhile waits
unread. Nothing of a request is kept without a bound, and no client is waited for without one.

Clients tend to send the same head with each request. It is compared with an earlier one of its connection
(`backends.http.head_pattern`); if all bytes match, the earlier parse result is used.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Protocol

from backends.http.head_pattern import HeadPattern, pattern_of
from backends.http.write_batch import WriteBatch
from gateway.http.chunks import ChunkedBody
from gateway.http.request_head import HeadLimits, RequestError, RequestHead, body_too_large, check_beginning, read_head

log = logging.getLogger(__name__)

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 1000)
}
_NO_BODY_STATUSES: Final = frozenset({204, 304})
_MAX_BLANK_LINES = 4
"""Before a request; some clients send one after a body."""
_MAX_WAITING_BYTES = 2**16
"""What may wait behind a request that is being answered before reading pauses: a paused client is not seen to leave."""
_MAX_IN_A_ROW = 16
"""Requests of a connection that are answered at once before other connections have their turn."""
_LINGER_S = 2.0
_BEGIN_S = 1.0
"""Seconds that a connection has to begin, or to complete a head, while the server is being stopped."""
SWEEP_S = 1.0
"""Seconds between checks for connections whose time is over."""
_LOG_EVERY_S = 60.0
_OVERFLOW_CONNECTIONS = 64
"""Connections above the limit that are told so; further ones are only closed."""
_MOST_IDLE = 1024
_IDLE_AGAIN_S = 0.05
"""Least seconds between two searches for idle connections, each of which looks at all connections."""
SHED_SHARE = 7 / 8
"""Share of the limit down to which unfinished requests are refused, so that the search for them is seldom."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server accepts."""

    head: HeadLimits = field(default_factory=HeadLimits)  # bounds of the head of a request
    body_bytes: int = 64 * 2**20  # size of a request body
    idle_s: float = 75.0  # seconds that a connection may be idle between requests
    # Seconds from the first byte of a head to its last, and from the beginning of a connection to its first byte.
    head_s: float = 30.0
    body_s: float = 300.0  # seconds from the head to the last byte of the body
    # Seconds that a client may take to send anything of a body, or to receive anything of an answer.
    stall_s: float = 60.0
    # Most connections. One more takes the place of the one that has been idle for longest; if none is, it is refused. A
    # connection is idle until the head of a request is complete, so incomplete heads keep nobody out.
    connections: int = 10_000
    # Most bytes of unfinished requests, over all connections. Above it, the one that holds most is refused.
    unfinished_bytes: int = 256 * 2**20


class Source(Protocol):
    """What produces the answer to a request."""

    def client_gone(self) -> None:
        """Stop, since the client has disconnected: nothing more can be sent."""

    def pause(self) -> None:
        """Pause while the client is slow to receive."""

    def resume(self) -> None:
        """Resume."""


class Service(Protocol):
    """What a server serves. Each method may answer the request at once."""

    def admit(self, reply: HttpReply) -> None:
        """Check a request whose head has arrived, before its body is read; an answer refuses it.

        It is not called again for a head that is known from an earlier request of the connection and was not refused.
        """

    def handle(self, reply: HttpReply, body: bytes) -> None:
        """Handle a complete request."""

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        """Answer a request that the server does not accept."""


class HttpReply:
    """One request of a connection, and the reply to it: a `whole` one, or `head`, any number of `data`, and `end`."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "has_ended",
        "is_admitted",
        "is_complete",
        "keep_alive",
        "request",
        "source",
    )

    def __init__(self, connection: ServerConnection, request: RequestHead) -> None:
        self._connection = connection
        self._chunked = request.is_http_1_1
        self._head = b""
        # Whether the service has seen the head and not refused it; once is enough for all requests with the same head.
        self.is_admitted = False
        self.request = request
        self.source: Source | None = None  # what produces the answer; set by the service
        self.keep_alive = request.keep_alive and not connection.server.is_stopping
        self.is_complete = False  # whether the request has been read completely
        self.has_ended = False  # whether the answer has ended or been aborted, or the client has disconnected

    # Called by the service and the source of the answer

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer; the head is written together with the first bytes of the body."""
        head = _STATUS_LINES[status] + self._connection.server.preamble() + lines
        if self.request.method == "HEAD" or status in _NO_BODY_STATUSES or b"\r\ncontent-length: " in head:
            self._chunked = False
        elif self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        self._head = head + self._close_line() + b"\r\n"

    def send_head(self) -> None:
        """Send the head now, before there is anything of the body."""
        head, self._head = self._head, b""
        self._connection.write_now(head)

    def data(self, chunk: bytes) -> None:
        """Send bytes of the body."""
        if not chunk or self.request.method == "HEAD":
            return
        head, self._head = self._head, b""
        self._connection.write_now(b"%b%x\r\n%b\r\n" % (head, len(chunk), chunk) if self._chunked else head + chunk)

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
        sent = b"" if self.request.method == "HEAD" else body
        preamble, close = self._connection.server.preamble(), self._close_line()
        self._connection.write(
            b"%b%b%b%bcontent-length: %d\r\n\r\n%b" % (_STATUS_LINES[status], preamble, lines, close, len(body), sent)
        )
        self._finish()

    def abort(self) -> None:
        """Close the connection before the end of the answer."""
        self.keep_alive = False
        self._finish()

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


class ServerConnection:
    """A connection of a client, which reads requests and has them answered one after another.

    It implements `asyncio.Protocol` without inheriting from it, so that mypyc can compile it.
    """

    __slots__ = (
        "_blank_lines",
        "_body",
        "_checked_bytes",
        "_chunks",
        "_is_closing",
        "_is_new",
        "_is_paused",
        "_known_head",
        "_missing_bytes",
        "_pattern",
        "_pending",
        "_read_s",
        "_reading",
        "_reply",
        "_since_s",
        "_slow_since_s",
        "_transport",
        "_unknown_heads",
        "held_bytes",
        "server",
    )

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.held_bytes = 0  # what the server has counted of this connection's unfinished request
        self._transport: Any = None
        self._reply: HttpReply | None = None  # the current request: being read or answered
        self._reading: HttpReply | None = None  # the same, until its body is complete
        self._missing_bytes = 0  # of its body
        self._body = bytearray()  # of its body, without the part that comes last
        self._chunks: ChunkedBody | None = None  # the same of a chunked body
        self._pending = b""  # received, but no whole head or chunk size yet, or behind the current request
        self._checked_bytes = 0  # of a head in `_pending`
        self._blank_lines = 0
        self._is_new = True
        self._is_closing = False  # what is received is dropped
        self._is_paused = False  # reading is
        self._since_s = 0.0  # when the connection became idle or closing, or the head or body that is being read began
        self._read_s = 0.0  # the last time that something of a body came
        self._slow_since_s = 0.0  # when the client became too slow to receive; 0.0 if it is not
        self._pattern: HeadPattern | None = None
        self._known_head: RequestHead | None = None
        self._unknown_heads = 0  # in a row

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        """Register the connection, or refuse it."""
        self._transport = transport
        self._since_s = time.monotonic()
        if self.server.register(self):
            return
        if self.server.is_overfull():
            self.abort()
        else:
            self._refuse(503, "The server has no room for another connection. Try again later.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the current answer, and break the reference cycles."""
        self._is_closing = True
        self.server.connections.discard(self)
        self._transport = None
        reply, self._reply = self._reply, None
        self._drop_input()
        if reply is not None:
            reply.client_gone()

    def eof_received(self) -> bool:
        """Return False, so that the transport closes itself and calls `connection_lost`."""
        return False

    def pause_writing(self) -> None:
        """Pause the answer while the client is slow to receive it."""
        self._slow_since_s = time.monotonic()
        if self._reply is not None and (source := self._reply.source) is not None:
            source.pause()

    def resume_writing(self) -> None:
        """Resume the answer, or go on with requests that wait."""
        self._slow_since_s = 0.0
        if self._reply is not None:
            if (source := self._reply.source) is not None:
                source.resume()
        elif self._pending:
            self._read_later()

    def data_received(self, data: bytes) -> None:
        """Read requests, and have each handled as soon as it is complete."""
        if self._is_closing:
            return
        received = len(self._pending)
        if received:
            data, self._pending = self._pending + data, b""
        self._read(data, received)

    # Reading

    def _read(self, data: bytes, received: int) -> None:
        """Read what there is, and keep the rest; the first `received` bytes have been here before."""
        at, size, count = 0, len(data), 0
        must_wait = False
        while at < size:
            if self._reading is not None:
                after = self._read_body(data, at)
            elif self._reply is not None or self._slow_since_s or count == _MAX_IN_A_ROW:
                must_wait = True
                break
            else:
                count += 1
                after = self._read_head(data, at, received)
            if self._is_closing:
                return
            if after == at:
                break
            at, received = after, 0
        if at < size:
            self._keep(data[at:] if at else data, must_wait=must_wait)
            if count == _MAX_IN_A_ROW and self._reply is None:
                self._read_later()
        elif self._is_paused:
            self._resume_reading()
        if self._reading is not None or self._pending or self.held_bytes:
            self._hold()

    def _keep(self, rest: bytes, *, must_wait: bool) -> None:
        """Keep what cannot be handled yet: an incomplete part of a request, or requests that must wait."""
        self._pending = rest
        if not must_wait:
            if self._is_paused:
                self._resume_reading()
        elif not self._is_paused and len(rest) > _MAX_WAITING_BYTES:
            self._is_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()

    def _read_later(self) -> None:
        asyncio.get_running_loop().call_soon(self._read_pending)

    def _read_pending(self) -> None:
        if self._pending and not self._is_closing:
            data, self._pending = self._pending, b""
            self._read(data, 0)

    def _read_head(self, data: bytes, at: int, received: int) -> int:
        """Begin a request, and return the offset after what was read of it; `at` if its head is not complete."""
        pattern, limits = self._pattern, self.server.limits
        if pattern is not None:
            begins = pattern.body_begins(data, at)
            if begins >= 0 and self._known_head is not None and pattern.length <= limits.body_bytes:
                self._unknown_heads = self._blank_lines = self._checked_bytes = 0
                reply = HttpReply(self, self._known_head)
                reply.is_admitted = True
                return self._begin(reply, pattern.length, data, begins)
        if data.startswith(b"\r\n", at):
            self._blank_lines += 1
            if self._blank_lines > _MAX_BLANK_LINES:
                self._refuse(400, "There are too many empty lines before the request.")
            return at + 2
        try:
            stop = data.find(b"\r\n\r\n", at + max(0, self._checked_bytes - 2))
            if stop < 0:
                if not received:
                    self._since_s = time.monotonic()
                self._checked_bytes = check_beginning(data[at:], self._checked_bytes, received, limits.head)
                return at
            request = read_head(data, at, stop + 4, limits.head)
            if request.length > limits.body_bytes:
                self._reading = HttpReply(self, request)
                raise body_too_large(limits.body_bytes)
        except RequestError as error:
            self._refuse(error.status, error.reason)
            return at
        self._is_new = False
        self._blank_lines = self._checked_bytes = 0
        if request.is_chunked:
            self._chunks = ChunkedBody(limits.head, limits.body_bytes)
        reply = HttpReply(self, request)
        after = self._begin(reply, request.length, data, stop + 4)
        if reply.is_admitted:
            self._learn_head(data, at, request)
        return after

    def _begin(self, reply: HttpReply, length: int, data: bytes, at: int) -> int:
        """Begin a request whose body begins at `at`, and return the offset after what is there of it."""
        self._reply = reply
        end = at + length
        if end <= len(data) and self._chunks is None:
            self._handle(reply, data[at:end])
            return end
        self._reading = reply
        self._missing_bytes = length
        self._since_s = time.monotonic()
        return self._read_body(data, at)

    def _read_body(self, data: bytes, at: int) -> int:
        """Read what is there of the body, and return the offset after it."""
        reply, chunks = self._reading, self._chunks
        assert reply is not None
        if chunks is not None:
            try:
                at = chunks.read(data, at)
            except RequestError as error:
                self._refuse(error.status, error.reason)
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
            self._reading = self._chunks = None
            self._body = bytearray()
            self._handle(reply, bytes(body))
            return at
        self._read_s = time.monotonic()
        if not reply.is_admitted and self._admit(reply) and reply.request.expects_continue:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return at

    def _admit(self, reply: HttpReply) -> bool:
        """Return whether the service admits the request."""
        self.server.service.admit(reply)
        reply.is_admitted = not reply.has_ended
        return reply.is_admitted

    def _handle(self, reply: HttpReply, body: bytes) -> None:
        """Have the service handle a complete request."""
        reply.is_complete = True
        if reply.is_admitted or self._admit(reply):
            self.server.service.handle(reply, body)

    def _hold(self) -> None:
        """Have the server count what is held of an unfinished request, and of those that wait."""
        chunks = self._chunks
        self.server.hold(self, len(self._pending) + (len(self._body) if chunks is None else len(chunks.data)))

    def _drop_input(self) -> None:
        self._reading = self._chunks = None
        self._pending = b""
        self._body = bytearray()
        if self.held_bytes:
            self.server.hold(self, 0)

    def _refuse(self, status: int, reason: str) -> None:
        """Refuse what is being read, and close the connection."""
        reply = self._reading
        if reply is None:
            reply = HttpReply(self, RequestHead("GET", b"/", []))
        self._reply = reply
        self._drop_input()
        self.server.service.refuse(reply, status, reason)

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
            self._pattern, self._known_head = pattern, request

    # Called by replies

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
        self._reply = None
        if not reply.keep_alive:
            self._close(lingers=not reply.is_complete)
            return
        self._since_s = time.monotonic()
        if self._pending:  # not while `_read` runs
            self._read_later()

    def _close(self, *, lingers: bool) -> None:
        """Close; in a while if the client is still sending, since it might not read the answer otherwise."""
        self._is_closing = True
        self._since_s = time.monotonic()
        self._drop_input()
        if self._is_paused:
            self._resume_reading()
        if not lingers:
            self.server.close(self._transport)

    # Called by the server

    def shutdown(self) -> None:
        """Close the connection once the current request has been answered, or one that may be on its way."""
        self.server.is_stopping = True
        if self._reply is not None:
            self._reply.keep_alive = False
        elif self._transport is not None and not self._is_closing:
            may_begin = (self._is_new or self._pending) and time.monotonic() - self._since_s < _BEGIN_S
            if not may_begin:
                self._close(lingers=False)

    def abort(self) -> None:
        """Close the connection at once."""
        self._is_closing = True
        self._drop_input()
        if self._transport is not None:
            self._transport.abort()

    def shed(self) -> None:
        """Refuse the unfinished request, or disconnect a client that sends more than is answered."""
        if self._reply is self._reading:  # no complete request is being answered
            self._refuse(503, "The server holds too many unfinished requests. Send the request again.")
        else:
            self.abort()

    def forget_head(self) -> None:
        """Have the service admit the next request, even if it has the head of an earlier one."""
        self._pattern = self._known_head = None

    def idle_since_s(self) -> float:
        """Return since when the next request, or the rest of its head, is waited for; infinity while none is."""
        return self._since_s if self._reply is None and self._transport is not None else math.inf

    def check(self, now_s: float) -> None:
        """Close the connection if its client has taken too long."""
        limits, transport, taken_s = self.server.limits, self._transport, now_s - self._since_s
        if transport is None:
            return
        if self._is_closing:
            if taken_s > _LINGER_S + limits.stall_s:
                transport.abort()
            elif taken_s > _LINGER_S:
                self.server.close(transport)
        elif self._slow_since_s:
            if now_s - self._slow_since_s > limits.stall_s:
                self.abort()
        elif self._reading is not None:
            if taken_s > limits.body_s or now_s - self._read_s > limits.stall_s:
                self._refuse(408, "The body of the request did not arrive in time.")
        elif self._reply is not None:
            return
        elif self._pending and not self.server.is_stopping:
            if taken_s > limits.head_s:
                self._refuse(408, "The head of the request did not arrive in time.")
        elif taken_s > self._idle_limit_s():
            self._close(lingers=False)

    def _idle_limit_s(self) -> float:
        if self.server.is_stopping:
            return _BEGIN_S
        return self.server.limits.head_s if self._is_new else self.server.limits.idle_s


class HttpServer:
    """What the connections of a server share."""

    def __init__(
        self,
        service: Service,
        limits: ServerLimits,
        *,
        extra_lines: bytes = b"",
        writes: WriteBatch | None = None,
        connections: set[Any] | None = None,
    ) -> None:
        self.service = service
        self.limits = limits
        self.writes = writes  # batch in which complete answers are written; None writes them immediately
        self.is_stopping = False  # whether the server is being stopped: no connection has another request
        # Set to keep the open connections in.
        self.connections: set[Any] = set() if connections is None else connections
        self._extra_lines = extra_lines  # header lines of every answer
        self._preamble = b""
        self._preamble_until_s = 0.0
        self._sweep: Any = None
        self._held_bytes = 0
        self._idlest: list[tuple[float, ServerConnection]] = []  # the last is idle for longest
        self._idlest_again_s = 0.0
        self._warn_again_s: dict[str, float] = {}

    def connect(self) -> ServerConnection:
        """Return the protocol of a new connection."""
        return ServerConnection(self)

    def forget_heads(self) -> None:
        """Have the service admit the next request of each connection: it would decide otherwise than before."""
        for connection in self.connections:
            connection.forget_head()

    def register(self, connection: ServerConnection) -> bool:
        """Keep a connection until it is lost, and check its time; return whether there is room for it."""
        connections, limit = self.connections, self.limits.connections
        while len(connections) >= limit and self._close_idlest():
            pass
        has_room = len(connections) < limit
        connections.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check)
        if not has_room:
            self._warn(f"all {limit} connections are in use: new ones are refused")
        return has_room

    def is_overfull(self) -> bool:
        """Return whether there are too many connections to tell another one that it is refused."""
        return len(self.connections) > self.limits.connections + _OVERFLOW_CONNECTIONS

    def _close_idlest(self) -> bool:
        """Close the connection that has been idle for longest; return False if none is idle."""
        now_s = time.monotonic()
        while True:
            while self._idlest:
                since_s, connection = self._idlest.pop()
                if connection.idle_since_s() == since_s:
                    self.connections.discard(connection)
                    connection.abort()
                    return True
            if now_s < self._idlest_again_s:
                return False
            self._idlest_again_s = now_s + _IDLE_AGAIN_S
            idle: list[tuple[float, ServerConnection]] = []
            for connection in self.connections:
                since_s = connection.idle_since_s()
                if since_s < now_s:
                    idle.append((since_s, connection))
            self._idlest = heapq.nsmallest(_MOST_IDLE, idle, key=_since_of)
            self._idlest.reverse()

    def hold(self, connection: ServerConnection, held_bytes: int) -> None:
        """Count what a connection holds of unfinished requests, and refuse the largest above the limit."""
        more_bytes = held_bytes - connection.held_bytes
        self._held_bytes += more_bytes
        connection.held_bytes = held_bytes
        if more_bytes > 0 and self._held_bytes > self.limits.unfinished_bytes:
            self._shed()

    def _shed(self) -> None:
        limit_bytes = self.limits.unfinished_bytes
        self._warn(f"unfinished requests hold more than {limit_bytes} bytes: the largest are refused")
        for connection in sorted(self.connections, key=_held_by, reverse=True):
            if self._held_bytes <= SHED_SHARE * limit_bytes:
                break
            connection.shed()

    def _warn(self, text: str) -> None:
        """Log a warning, once a minute."""
        now_s = time.monotonic()
        if now_s >= self._warn_again_s.get(text, 0.0):
            self._warn_again_s[text] = now_s + _LOG_EVERY_S
            log.warning("%s", text)

    def close(self, transport: Any) -> None:
        """Close a transport after what is to be written to it."""
        if self.writes is not None:
            self.writes.flush()
        transport.close()

    def preamble(self) -> bytes:
        """Return the header lines of every answer; made again once a second, for their date."""
        now_s = time.time()
        if not 0.0 < self._preamble_until_s - now_s <= 1.0:
            self._preamble = f"date: {formatdate(now_s, usegmt=True)}\r\n".encode("ascii") + self._extra_lines
            self._preamble_until_s = float(int(now_s)) + 1.0
        return self._preamble

    def _check(self) -> None:
        """Check the time of all connections; one timer for all avoids two timer changes a request."""
        now_s = time.monotonic()
        for connection in list(self.connections):
            connection.check(now_s)
        running = bool(self.connections)
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check) if running else None


def _since_of(idle: tuple[float, ServerConnection]) -> float:
    return idle[0]


def _held_by(connection: ServerConnection) -> int:
    return connection.held_bytes
