"""One relayed request on a uvicorn connection; takes the place of uvicorn's own request object."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gateway.http.errors import GatewayError, endpoint_of, too_large
from gateway.http.headers import lines_of
from gateway.relay.context import Inbound
from gateway.relay.exchange import Exchange
from gateway.routing.request_head import RequestHead

if TYPE_CHECKING:
    from gateway.frontend.connection import ClientConnection

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 1000)
}
_LINGER_S = 2.0
_NO_BODY_STATUSES = frozenset({204, 304})


class RequestCycle:
    """One relayed request on a uvicorn connection, and the `Reply` to it.

    Takes the place of uvicorn's `RequestResponseCycle` and has the same public state: uvicorn appends to `body`, sets
    `more_body` and `disconnected`, and after each change sets `message_event`, which here is the cycle itself.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_exchange",
        "_is_head",
        "_reply_head",
        "_request",
        "_started",
        "_transport",
        "body",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
    )

    def __init__(self, connection: ClientConnection, request: RequestHead) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._request = request
        self._is_head = request.method == "HEAD"
        self._exchange: Exchange | None = None
        self._started = False
        self._reply_head = b""
        self._chunked = request.is_http_1_1
        self.keep_alive: bool = request.keep_alive
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.response_complete = False

    @property
    def message_event(self) -> RequestCycle:
        """The event that uvicorn sets when the state of the request has changed."""
        return self

    def set(self) -> None:
        """Handle more of the body, its end, or the disconnection of the client."""
        if self.disconnected:
            exchange, self._exchange = self._exchange, None  # breaks the reference cycle
            if exchange is not None and not self.response_complete:
                exchange.client_gone()
            return
        if not self._started or self._exchange is not None or self.response_complete:
            return
        if len(self.body) > self._connection.max_body_bytes:
            self._refuse(too_large(self._connection.max_body_bytes))
        elif self.more_body:
            self._connection.protocol.flow.resume_reading()
        else:
            body = bytes(self.body)
            self.body = bytearray()
            self.begin(body)

    async def run_asgi(self, _: Any) -> None:
        """Start after the previous request of the connection has been answered; uvicorn runs this as a task."""
        self.start()

    def start(self) -> None:
        """Check the API key and the content length, then wait for the body."""
        if self._connection.protocol is None:
            return  # the client disconnected while this was queued behind another request
        self._started = True
        request, limit = self._request, self._connection.max_body_bytes
        try:
            if request.request_headers is None:
                request.request_headers = self._connection.relay.request_headers(request.method, request.headers)
            if request.content_length.isdigit() and int(request.content_length) > limit:
                raise too_large(limit)
        except GatewayError as error:
            self._refuse(error)
            return
        if request.expects_continue and self.more_body:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.more_body:
            self.set()

    def begin(self, body: bytes) -> None:
        """Relay the request, whose body is complete."""
        request, connection = self._request, self._connection
        assert request.request_headers is not None
        self._started = True
        self.more_body = False
        inbound = Inbound(request.request_headers, request.path, request.target, body)
        exchange = Exchange(connection.relay, inbound, self)
        connection.running = self
        self._exchange = exchange  # before `begin`, which may already answer or see the client disconnect
        exchange.begin()

    def pause(self) -> None:
        """Pause reading from the backend."""
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """Resume reading from the backend."""
        if self._exchange is not None:
            self._exchange.resume()

    # Reply

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer; the head is written together with the first bytes of the body."""
        head = _STATUS_LINES[status] + self._connection.preamble.current() + lines
        if self._is_head or status in _NO_BODY_STATUSES or b"\r\ncontent-length: " in head:
            self._chunked = False
        elif self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            head += b"connection: close\r\n"
        self._reply_head = head + b"\r\n"

    def data(self, chunk: bytes) -> None:
        """Send bytes of the body."""
        if self._is_head or not chunk:
            return
        head, self._reply_head = self._reply_head, b""
        if self._chunked:
            self._transport.write_now(b"%s%x\r\n%s\r\n" % (head, len(chunk), chunk))
        else:
            self._transport.write_now(head + chunk)

    def end(self) -> None:
        """End the answer."""
        rest = self._reply_head + (b"0\r\n\r\n" if self._chunked else b"")
        if rest:
            self._transport.write_now(rest)
        self._end()

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a complete answer in one write; not for answers without a body (HEAD, 204, 304)."""
        close = b"" if self.keep_alive else b"connection: close\r\n"
        preamble = self._connection.preamble.current()
        self._transport.write(
            b"%b%b%b%bcontent-length: %d\r\n\r\n%b" % (_STATUS_LINES[status], preamble, lines, close, len(body), body)
        )
        self._end()

    def _end(self) -> None:
        self._complete()
        if not self.keep_alive and self.more_body:  # a client still sending might not read the answer if closed at once
            self._connection.protocol.loop.call_later(_LINGER_S, self._transport.close)
            return
        if not self.keep_alive:
            self._transport.close()
        self._connection.answered()

    def abort(self) -> None:
        """Close the connection before the end of the answer."""
        self._complete()
        self._transport.close()

    def _complete(self) -> None:
        self.response_complete = True
        self._exchange = None  # breaks the reference cycle, which would wait for the garbage collector

    def _refuse(self, error: GatewayError) -> None:
        self._connection.relay.metrics.count_refusal()
        request = self._request
        headers, body = error.answer(endpoint_of(request.path), dict(request.headers).get(b"x-request-id", b""))
        if self.more_body:
            self.keep_alive = False  # rather than read the rest of the body
        self.head(error.status, lines_of(headers))
        self.data(body)
        self.end()
