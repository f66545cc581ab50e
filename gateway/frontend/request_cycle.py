"""One request of the relay on a connection of uvicorn's: it stands where uvicorn has its own object for a request."""

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
    """One request of the relay on a connection of uvicorn's, and the `Reply` to it.

    It stands where uvicorn has its `RequestResponseCycle`, whose public state it has too: uvicorn adds to `body`,
    sets `more_body` and `disconnected`, and each time sets `message_event`, which here is the cycle itself.
    """

    __slots__ = (
        "_chunked",
        "_exchange",
        "_is_head",
        "_line",
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

    def __init__(self, line: ClientConnection, request: RequestHead) -> None:
        self._line = line
        self._transport = line.transport
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
        """What uvicorn sets when something has happened to the request."""
        return self

    def set(self) -> None:
        """Go on with the request: more of its body came, or its end, or the client left."""
        if self.disconnected:
            exchange, self._exchange = self._exchange, None  # each holds the other
            if exchange is not None and not self.response_complete:
                exchange.client_gone()
            return
        if not self._started or self._exchange is not None or self.response_complete:
            return
        if len(self.body) > self._line.max_body_bytes:
            self._refuse(too_large(self._line.max_body_bytes))
        elif self.more_body:
            self._line.protocol.flow.resume_reading()
        else:
            body = bytes(self.body)
            self.body = bytearray()
            self.begin(body)

    async def run_asgi(self, _: Any) -> None:
        """Start, after the request before it on the connection was answered; what uvicorn runs as a task."""
        self.start()

    def start(self) -> None:
        """Check the key and the announced length, and then wait for the body."""
        if self._line.protocol is None:
            return  # the client left while this waited behind another
        self._started = True
        request, limit = self._request, self._line.max_body_bytes
        try:
            if request.request_headers is None:
                request.request_headers = self._line.relay.request_headers(request.method, request.headers)
            if request.announced.isdigit() and int(request.announced) > limit:
                raise too_large(limit)
        except GatewayError as error:
            self._refuse(error)
            return
        if request.expects and self.more_body:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.more_body:
            self.set()

    def begin(self, body: bytes) -> None:
        """Relay the request, now that all of it has come."""
        request, line = self._request, self._line
        assert request.request_headers is not None
        self._started = True
        self.more_body = False
        inbound = Inbound(request.request_headers, request.path, request.target, body)
        exchange = Exchange(line.relay, inbound, self)
        line.running = self
        self._exchange = exchange  # before it begins: an answer may come, and the client go, while it does
        exchange.begin()

    def pause(self) -> None:
        """Let the backend wait."""
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """Let it go on."""
        if self._exchange is not None:
            self._exchange.resume()

    # The reply.

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer; it is written with the first bytes of its body."""
        head = _STATUS_LINES[status] + self._line.preamble.current() + lines
        if self._is_head or status in _NO_BODY_STATUSES or b"\r\ncontent-length: " in head:
            self._chunked = False
        elif self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            head += b"connection: close\r\n"
        self._reply_head = head + b"\r\n"

    def data(self, chunk: bytes) -> None:
        """Send bytes of its body."""
        if self._is_head or not chunk:
            return
        head, self._reply_head = self._reply_head, b""
        if self._chunked:
            self._transport.write_now(b"%s%x\r\n%s\r\n" % (head, len(chunk), chunk))
        else:
            self._transport.write_now(head + chunk)

    def end(self) -> None:
        """End it well."""
        rest = self._reply_head + (b"0\r\n\r\n" if self._chunked else b"")
        if rest:
            self._transport.write_now(rest)
        self._end()

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send all of an answer to a request that may have a body in its answer, in one piece."""
        close = b"" if self.keep_alive else b"connection: close\r\n"
        preamble = self._line.preamble.current()
        self._transport.write(
            b"%b%b%b%bcontent-length: %d\r\n\r\n%b" % (_STATUS_LINES[status], preamble, lines, close, len(body), body)
        )
        self._end()

    def _end(self) -> None:
        self._complete()
        if not self.keep_alive and self.more_body:  # closed at once, the client might not read the answer
            self._line.protocol.loop.call_later(_LINGER_S, self._transport.close)
            return
        if not self.keep_alive:
            self._transport.close()
        self._line.answered()

    def cut(self) -> None:
        """End it badly: the client sees the connection close before the end of the answer."""
        self._complete()
        self._transport.close()

    def _complete(self) -> None:
        self.response_complete = True
        self._exchange = None  # which holds this reply: what refers to each other waits for the garbage collector

    def _refuse(self, error: GatewayError) -> None:
        self._line.relay.metrics.count_refusal()
        request = self._request
        headers, body = error.answer(endpoint_of(request.path), dict(request.headers).get(b"x-request-id", b""))
        if self.more_body:
            self.keep_alive = False  # rather than read all of what will not be used
        self.head(error.status, lines_of(headers))
        self.data(body)
        self.end()
