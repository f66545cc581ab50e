"""An HTTP/1.1 server over asyncio protocols and httptools, for the gateway and for simulated replicas.

A complete request goes to a `Service` in the call that read its last byte, and the answer is written to the socket in
the call that made it: no task, no queue. Nothing of a request is kept without a bound.

Clients tend to send the same head with each request. It is compared with an earlier one of its connection
(`backends.http.head_pattern`); if all bytes match, the earlier parse result is used. A request whose head differs, or
that arrives while another one of its connection is in flight, goes through the parser.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools

from backends.http.head_pattern import HeadPattern, pattern_of
from backends.http.write_batch import WriteBatch

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 1000)
}
_NO_BODY_STATUSES: Final = frozenset({204, 304})
_MAX_READ_BYTES: Final = 2**18
"""Most bytes that an event loop reads at once."""

_LINGER_S: Final = 2.0
SWEEP_S = 1.0
"""Seconds between checks for connections that have been idle for too long."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server accepts.

    Parameters
    ----------
    line_bytes
        Size of a request target.
    head_bytes, fields
        Size and number of a request's headers.
    body_bytes
        Size of a request body.
    idle_s
        Seconds that a connection may be idle between requests.
    """

    line_bytes: int = 8 * 1024
    head_bytes: int = 64 * 1024
    fields: int = 100
    body_bytes: int = 64 * 2**20
    idle_s: float = 75.0


class RequestHead:
    """The head of a request.

    Attributes
    ----------
    path
        Decoded path, without the query.
    target
        Path and query as received.
    headers
        Headers in order, with lower-case names.
    content_length
        Value of `content-length`; empty if there is none.
    expects_continue
        Whether the client waits for `100 Continue`.
    is_http_1_1
        False for HTTP/1.0, which has no chunks: closing the connection ends the answer.
    notes
        What the service keeps with the head; it finds it there again with each request that has the same head.
    """

    __slots__ = (
        "content_length",
        "expects_continue",
        "headers",
        "is_http_1_1",
        "keep_alive",
        "method",
        "notes",
        "path",
        "target",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        content_length: bytes = b"",
        expects_continue: bool = False,
        is_http_1_1: bool = True,
        keep_alive: bool = False,
    ) -> None:
        path = target.partition(b"?")[0].decode("latin-1")
        self.path = unquote(path) if "%" in path else path
        self.method = method
        self.target = target
        self.headers = headers
        self.content_length = content_length
        self.expects_continue = expects_continue
        self.is_http_1_1 = is_http_1_1
        self.keep_alive = keep_alive
        self.notes: Any = None


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
    """One request of a connection, and the reply to it: a `whole` one, or `head`, any number of `data`, and `end`.

    Attributes
    ----------
    source
        What produces the answer; set by the service.
    body_bytes
        Size of the body, as far as it has been read.
    is_admitted
        Whether the service has seen the head; once is enough for all requests with the same head.
    is_complete
        Whether the request has been read completely.
    is_handled
        Whether the service was given the request: it was not refused.
    has_ended
        Whether the answer has ended or been aborted, or the client has disconnected.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_parts",
        "_refusal",
        "body_bytes",
        "has_ended",
        "is_admitted",
        "is_complete",
        "is_handled",
        "keep_alive",
        "request",
        "source",
    )

    def __init__(self, connection: ServerConnection, request: RequestHead) -> None:
        self._connection = connection
        self._chunked = request.is_http_1_1
        self._head = b""
        self._parts: list[bytes] = []
        self.body_bytes = 0
        self.is_admitted = self.is_handled = False
        self._refusal: tuple[int, str] | None = None
        self.request = request
        self.source: Source | None = None
        self.keep_alive = request.keep_alive
        self.is_complete = False
        self.has_ended = False

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

    def add(self, data: bytes) -> None:
        """Append a part of the body, unless the request is refused."""
        self.body_bytes += len(data)
        if not self.has_ended and self._refusal is None:
            self._parts.append(data)
            if self.body_bytes > (limit_bytes := self._connection.server.limits.body_bytes):
                self.refuse(413, f"The body is larger than {limit_bytes} bytes.")

    def refuse(self, status: int, reason: str) -> None:
        """Have the request refused when its turn has come."""
        self._refusal = (status, reason)
        self._parts.clear()

    def proceed(self) -> None:
        """Do what can be done now that it is this request's turn: admit it before its body, handle it after."""
        connection, service, request = self._connection, self._connection.server.service, self.request
        if self.has_ended:
            return
        if self._refusal is not None:
            service.refuse(self, *self._refusal)
            return
        if not self.is_admitted:
            self.is_admitted = True
            service.admit(self)
            if not (self.has_ended or self.is_complete) and request.expects_continue:
                connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.is_complete and not (self.has_ended or self.is_handled):
            self.is_handled = True
            parts, self._parts = self._parts, []
            service.handle(self, parts[0] if len(parts) == 1 else b"".join(parts))

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
        "_body_begins",
        "_content_length",
        "_expects_continue",
        "_first",
        "_has_begun",
        "_head_bytes",
        "_headers",
        "_idle_since_s",
        "_is_between",
        "_is_deaf",
        "_is_in_head",
        "_known_head",
        "_missing_bytes",
        "_parser",
        "_pattern",
        "_reading",
        "_replies",
        "_target",
        "_transport",
        "_unknown_heads",
        "_unread_bytes",
        "server",
    )

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._replies: deque[HttpReply] = deque()  # in order; the first is being answered
        self._reading: HttpReply | None = None  # its body is being read
        self._target = self._content_length = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._expects_continue = False
        self._is_between = True  # the parser waits for the first byte of a request
        self._is_in_head = False
        self._has_begun = False  # a request, in the data that is being parsed
        self._is_deaf = False  # reads no more
        self._idle_since_s = 0.0  # 0.0 while a request is being read or answered
        self._first: bytes | None = None  # the data that the current request began with
        self._pattern: HeadPattern | None = None
        self._known_head: RequestHead | None = None
        self._body_begins = 0  # in the data that begins with the known head
        self._missing_bytes = 0  # of the body of a request with a known head
        self._unread_bytes = 0  # received since the current request began, with the framing of its body
        self._unknown_heads = 0  # in a row

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        """Register the connection."""
        self._transport = transport
        self._idle_since_s = time.monotonic()
        self.server.register(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the current answer, and break the reference cycles."""
        self._is_deaf = True
        self.server.connections.discard(self)
        self._transport = self._parser = self._reading = None
        replies, self._replies = self._replies, deque()
        if replies:
            replies[0].client_gone()

    def eof_received(self) -> bool:
        """Return False, so that the transport closes itself and calls `connection_lost`."""
        return False

    def pause_writing(self) -> None:
        """Pause the answer while the client is slow to receive it."""
        if self._replies and (source := self._replies[0].source) is not None:
            source.pause()

    def resume_writing(self) -> None:
        """Resume the answer."""
        if self._replies and (source := self._replies[0].source) is not None:
            source.resume()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, of known heads without the parser."""
        if self._is_deaf:
            return
        self._idle_since_s = 0.0
        while data:
            pattern = self._pattern
            if self._missing_bytes:
                data = self._add_to_known(data)
            elif pattern is not None and self._is_between and not self._replies and self._begins_known(pattern, data):
                self._unknown_heads = 0
                data = self._add_to_known(data[self._body_begins :])
            else:
                data = self._parse(data)
        if len(self._replies) > 1 and self._transport is not None:
            self._transport.pause_reading()

    def _begins_known(self, pattern: HeadPattern, data: bytes) -> bool:
        """Begin a request and return True if `data` begins with the known head."""
        begins = pattern.body_begins(data)
        if begins < 0 or self._known_head is None or pattern.length > self.server.limits.body_bytes:
            return False
        self._body_begins = begins
        self._missing_bytes = pattern.length
        reply = self._reading = HttpReply(self, self._known_head)
        reply.is_admitted = True
        self._replies.append(reply)
        return True

    def _add_to_known(self, data: bytes) -> bytes:
        """Handle bytes of the body of a request with a known head, and return those after it."""
        reply, more = self._reading, len(data) - self._missing_bytes
        assert reply is not None
        if more < 0:
            self._missing_bytes = -more
            reply.add(data)
            reply.proceed()
            return b""
        self._missing_bytes = 0
        self._reading = None
        reply.add(data if more == 0 else data[: len(data) - more])
        reply.is_complete = True
        reply.proceed()
        return data[len(data) - more :] if more else b""

    def _parse(self, data: bytes) -> bytes:
        """Have the parser handle bytes, and return those to be parsed again."""
        if self._is_between:
            self._first = data
        self._has_begun = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_deaf:
                return b""
            # Ignored, as RFC 9110 allows (section 7.8). The parser would skip the body, so a new one gets the same head
            # without the field.
            head = self._head_without_upgrade()
            self._parser = httptools.HttpRequestParser(self)
            self._is_between = True
            return head + data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            raise  # a defect here, not of the client
        except httptools.HttpParserError as error:
            self._refuse(400, f"This is not a valid HTTP/1.1 request ({error}).")
            return b""
        reply, limits = self._reading, self.server.limits
        if self._is_in_head:
            self._head_bytes += 0 if self._has_begun else len(data)
            self._check_head(self._head_bytes)
        elif reply is not None:
            self._unread_bytes += len(data)
            if self._unread_bytes > 16 * reply.body_bytes + limits.head_bytes + _MAX_READ_BYTES:
                self._refuse(413, "The framing of the chunks is much larger than the body.")
            else:
                self._proceed(reply)
        return b""

    # Called by httptools

    def on_message_begin(self) -> None:
        """Start a request."""
        self._is_between = False
        self._is_in_head = self._has_begun = True
        self._target = self._content_length = b""
        self._expects_continue = False
        self._headers = []
        self._head_bytes = self._unread_bytes = 0

    def on_url(self, target: bytes) -> None:
        """Append to the request target."""
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; fields after the body (trailers) are ignored."""
        if not self._is_in_head:
            return
        name = name.lower()
        if name == b"content-length":
            self._content_length = value
        elif name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Queue the request behind the ones of this connection that are still to be answered."""
        self._is_in_head = False
        if self._parser.get_method() == b"CONNECT":
            self._refuse(405, "CONNECT is not supported: this is not a forward proxy.")
        if (
            self._is_deaf
            or self._parser.should_upgrade()
            or not self._check_head(sum([len(name) + len(value) for name, value in self._headers]))
        ):
            return
        parser = self._parser
        is_http_1_1 = parser.get_http_version() != "1.0"
        request = RequestHead(
            parser.get_method().decode("ascii"),
            self._target if self._target.startswith(b"/") else _origin_form(self._target),
            self._headers,
            content_length=self._content_length,
            expects_continue=self._expects_continue,
            is_http_1_1=is_http_1_1,
            keep_alive=is_http_1_1 and parser.should_keep_alive(),
        )
        reply = self._reading = HttpReply(self, request)
        self._replies.append(reply)
        length, limit_bytes = self._content_length, self.server.limits.body_bytes
        if length and int(length) > limit_bytes:
            reply.refuse(413, f"The body of {int(length)} bytes is larger than {limit_bytes} bytes.")

    def on_body(self, data: bytes) -> None:
        """Append to the body of the request."""
        if self._reading is not None:
            self._reading.add(data)

    def on_message_complete(self) -> None:
        """Have a complete request handled."""
        self._is_between = True
        reply, self._reading = self._reading, None
        if reply is None:
            return
        reply.is_complete = True
        first, self._first = self._first, None  # a request that follows in the same data begins somewhere within it
        self._proceed(reply)
        if first is not None and reply.is_handled:  # not one that was refused
            self._learn_head(first, reply.request)

    def _head_without_upgrade(self) -> bytes:
        parser, lines = self._parser, [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        version = parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (parser.get_method(), self._target, version, b"".join(lines))

    def _proceed(self, reply: HttpReply) -> None:
        """Go on with a request if it is its turn."""
        if self._replies and reply is self._replies[0]:
            reply.proceed()

    def _check_head(self, head_bytes: int) -> bool:
        """Return whether the head so far is within the limits; if not, refuse it."""
        limits = self.server.limits
        if len(self._target) > limits.line_bytes:
            self._refuse(414, f"The request target is longer than {limits.line_bytes} bytes.")
        elif len(self._headers) > limits.fields:
            self._refuse(431, f"The request has more than {limits.fields} headers.")
        elif head_bytes > limits.head_bytes + limits.line_bytes:
            self._refuse(431, f"The headers are larger than {limits.head_bytes} bytes.")
        else:
            return True
        return False

    def _refuse(self, status: int, reason: str) -> None:
        """Refuse what cannot be read as a request, once the ones before it have been answered, and read no more."""
        self._is_deaf = True
        reply = self._reading
        if reply is None:
            reply = HttpReply(self, RequestHead("GET", b"/", []))
            self._replies.append(reply)
        reply.refuse(status, reason)
        self._proceed(reply)

    def _learn_head(self, first: bytes, request: RequestHead) -> None:
        """Remember the head of a request.

        If all heads differ (by a request id, for example), only one in 16 is remembered, in case that changes.
        """
        self._unknown_heads += 1
        if (
            request.expects_continue
            or not (request.keep_alive and request.content_length)
            or (self._unknown_heads > 16 and self._unknown_heads % 16)
        ):
            return
        pattern = pattern_of(first)
        if pattern is not None and request.content_length == b"%d" % pattern.length:
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
        self._replies.popleft()
        if not reply.keep_alive:
            self._close(0.0 if reply.is_complete else _LINGER_S)
        elif self._replies:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._transport.resume_reading()
            self._idle_since_s = time.monotonic()

    def _next(self) -> None:
        if self._replies and self._transport is not None:
            if len(self._replies) == 1:
                self._transport.resume_reading()
            self._replies[0].proceed()

    def _close(self, after_s: float) -> None:
        """Close; later if the client is still sending, since it might not read the answer otherwise."""
        self._is_deaf = True
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self._transport.close)
            return
        if self.server.writes is not None:
            self.server.writes.flush()
        self._transport.close()

    # Called by the server

    def shutdown(self) -> None:
        """Close the connection once the current request has been answered."""
        if self._replies:
            self._replies[0].keep_alive = False
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def check_idle(self, now_s: float) -> None:
        """Close the connection if it has been idle for too long."""
        if self._idle_since_s and now_s - self._idle_since_s > self.server.limits.idle_s:
            self._close(0.0)


class HttpServer:
    """What the connections of a server share.

    Parameters
    ----------
    extra_lines
        Header lines of every answer.
    writes
        Batch in which complete answers are written; None writes them immediately.
    connections
        Set to keep the open connections in.
    """

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
        self.writes = writes
        self.connections: set[Any] = set() if connections is None else connections
        self._extra_lines = extra_lines
        self._preamble = b""
        self._preamble_until_s = 0.0
        self._sweep: Any = None

    def connect(self) -> ServerConnection:
        """Return the protocol of a new connection."""
        return ServerConnection(self)

    def register(self, connection: ServerConnection) -> None:
        """Keep a connection until it is lost, and close it if it is idle for too long."""
        self.connections.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check_idle)

    def preamble(self) -> bytes:
        """Return the header lines of every answer; made again once a second, for their date."""
        now_s = time.time()
        if not 0.0 < self._preamble_until_s - now_s <= 1.0:
            self._preamble = f"date: {formatdate(now_s, usegmt=True)}\r\n".encode("ascii") + self._extra_lines
            self._preamble_until_s = float(int(now_s)) + 1.0
        return self._preamble

    def _check_idle(self) -> None:
        """Close idle connections; one timer for all avoids two timer changes a request."""
        now_s = time.monotonic()
        for connection in list(self.connections):
            connection.check_idle(now_s)
        running = bool(self.connections)
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check_idle) if running else None


def _origin_form(target: bytes) -> bytes:
    """Return the path and query of an absolute URL, the form that clients send to a proxy."""
    try:
        parsed: Any = httptools.parse_url(target)  # its parts may be None, other than its types say
    except httptools.HttpParserInvalidURLError:
        return b"/"
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
