"""One request of the relay on a connection of uvicorn's: it stands where uvicorn has its own object for a request."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gateway.envelope import Envelope
from gateway.exchange import Exchange
from gateway.headers import Header
from gateway.openai import GatewayError, endpoint_of, too_large
from gateway.relay import Inbound

if TYPE_CHECKING:
    from gateway.fast import RelayProtocol

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 1000)
}
_LINGER_S = 2.0
_NO_BODY_STATUSES = frozenset({204, 304})


class RelayCycle:
    """One request of the relay on a connection of uvicorn's, and the `Reply` to it.

    It stands where uvicorn has its `RequestResponseCycle`, whose public state it has too: uvicorn adds to `body`,
    sets `more_body` and `disconnected`, and each time sets `message_event`, which here is the cycle itself.
    """

    __slots__ = (
        "_announced",
        "_chunked",
        "_envelope",
        "_exchange",
        "_expects",
        "_head",
        "_headers",
        "_is_head",
        "_method",
        "_path",
        "_protocol",
        "_started",
        "_target",
        "_transport",
        "body",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
    )

    def __init__(self, protocol: RelayProtocol, target: bytes, path: str) -> None:
        parser = protocol.parser
        self._protocol = protocol
        self._transport = protocol.transport
        self._headers: list[Header] = protocol.headers
        self._announced = protocol.announced
        self._expects = protocol.expect_100_continue
        self._method = parser.get_method().decode("ascii")
        self._is_head = self._method == "HEAD"
        self._target = target
        self._path = path
        self._envelope: Envelope | None = None
        self._exchange: Exchange | None = None
        self._started = False
        self._head = b""
        # HTTP/1.0 knows no chunks: the end of the connection is the end of the answer.
        self._chunked = parser.get_http_version() != "1.0"
        self.keep_alive: bool = self._chunked and parser.should_keep_alive()
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.response_complete = False

    @property
    def message_event(self) -> RelayCycle:
        """What uvicorn sets when something has happened to the request."""
        return self

    def set(self) -> None:
        """Go on with the request: more of its body came, or its end, or the client left."""
        if self.disconnected:
            if self._exchange is not None and not self.response_complete:
                self._exchange.client_gone()
            return
        if not self._started or self._exchange is not None or self.response_complete:
            return
        if len(self.body) > self.max_body_bytes:
            self._refuse(too_large(self.max_body_bytes))
        elif self.more_body:
            self._protocol.flow.resume_reading()
        else:
            self._begin()

    async def run_asgi(self, _: Any) -> None:
        """Start, after the request before it on the connection was answered; what uvicorn runs as a task."""
        self.start()

    @property
    def max_body_bytes(self) -> int:
        """The largest body that is taken."""
        return self._protocol.max_body_bytes

    def start(self) -> None:
        """Check the key and the announced length, and then wait for the body."""
        self._started = True
        try:
            self._envelope = self._protocol.envelope_of(self._method, self._headers)
            if self._announced.isdigit() and int(self._announced) > self.max_body_bytes:
                raise too_large(self.max_body_bytes)
        except GatewayError as error:
            self._refuse(error)
            return
        if self._expects and self.more_body:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.more_body:
            self.set()

    def _begin(self) -> None:
        assert self._envelope is not None
        inbound = Inbound(self._envelope, self._path, self._target, bytes(self.body))
        self.body = bytearray()
        exchange = Exchange(self._protocol.relay, inbound, self)
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

    def head(self, status: int, headers: list[Header]) -> None:
        """Begin the answer; it is written with the first bytes of its body."""
        sent = (*self._protocol.server_state.default_headers, *headers)
        head = _STATUS_LINES[status] + b"".join([b"%b: %b\r\n" % header for header in sent])
        if self._is_head or status in _NO_BODY_STATUSES or b"\r\ncontent-length: " in head:
            self._chunked = False
        elif self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            head += b"connection: close\r\n"
        self._head = head + b"\r\n"

    def data(self, chunk: bytes) -> None:
        """Send bytes of its body."""
        if self._is_head or not chunk:
            return
        head, self._head = self._head, b""
        if self._chunked:
            self._transport.write(b"%s%x\r\n%s\r\n" % (head, len(chunk), chunk))
        else:
            self._transport.write(head + chunk)

    def end(self) -> None:
        """End it well."""
        rest = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if rest:
            self._transport.write(rest)
        self._complete()
        if not self.keep_alive and self.more_body:  # closed at once, the client might not read the answer
            self._protocol.loop.call_later(_LINGER_S, self._transport.close)
            return
        if not self.keep_alive:
            self._transport.close()
        self._protocol.on_response_complete()

    def cut(self) -> None:
        """End it badly: the client sees the connection close before the end of the answer."""
        self._complete()
        self._transport.close()

    def _complete(self) -> None:
        self.response_complete = True
        self._exchange = None  # which holds this reply: what refers to each other waits for the garbage collector

    def _refuse(self, error: GatewayError) -> None:
        self._protocol.relay.metrics.count_refusal()
        headers, body = error.answer(endpoint_of(self._path), dict(self._headers).get(b"x-request-id", b""))
        if self.more_body:
            self.keep_alive = False  # rather than read all of what will not be used
        self.head(error.status, headers)
        self.data(body)
        self.end()
