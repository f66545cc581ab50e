"""A callback-based HTTP/1.1 server over `asyncio.Protocol` and httptools.

A stream's chunk goes from the engine's step to the socket in one call, without a task switch or a queue. This lets one
process serve hundreds of streams on time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

import httptools

_KEEP_ALIVE_S = 5.0  # as in vLLM's server
_MAX_BODY_BYTES = 64 * 2**20
_PHRASES = {status.value: status.phrase for status in HTTPStatus}

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Request:
    """A complete request.

    Parameters
    ----------
    headers
        By lower-case name; of repeated headers the last counts.
    received_s
        Time of completion, on the event loop's clock.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    received_s: float
    http_1_0: bool = False


class Exchange:
    """A request and its answer: either one `respond`, or `start`, any number of `write`s, and `end`.

    When the client disconnects, `gone` becomes true and `on_gone` is called; further writes are ignored.
    """

    __slots__ = ("_chunked", "_connection", "answer_headers", "gone", "on_finished", "on_gone", "request", "status")

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._chunked = not request.http_1_0
        self.request = request
        self.answer_headers: Headers = []
        self.gone = False
        self.status = 0
        self.on_gone: Callable[[], object] | None = None
        self.on_finished: Callable[[Exchange], None] | None = None

    @property
    def started(self) -> bool:
        """Whether the head of the answer has been sent."""
        return self.status != 0

    def respond(self, status: int, body: bytes, content_type: str | None = "application/json") -> None:
        """Send a complete answer."""
        headers: Headers = [("content-length", str(len(body)))]
        if content_type is not None:
            headers.append(("content-type", content_type))
        self._send(self._head(status, headers) + (b"" if self.request.method == "HEAD" else body))
        self._finish()

    def start(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Send the head of a streamed answer."""
        headers: Headers = [("content-type", content_type)]
        if self._chunked:
            headers.append(("transfer-encoding", "chunked"))
        self._send(self._head(200, headers))

    def write(self, data: bytes) -> None:
        """Send bytes of a streamed answer as one chunk."""
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self, data: bytes = b"") -> None:
        """Send the last bytes of a streamed answer and end it."""
        if data:
            self.write(data)
        if self._chunked:
            self._send(b"0\r\n\r\n")
        self._finish()

    def _head(self, status: int, headers: Headers) -> bytes:
        self.status = status
        named = [("date", _date()), ("server", "simulated-vllm"), *headers, *self.answer_headers]
        if not self._connection.keeps_alive:
            named.append(("connection", "close"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in named)
        return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n{lines}\r\n".encode("latin-1", "replace")

    def _send(self, data: bytes) -> None:
        if not self.gone:
            self._connection.send(data)

    def _finish(self) -> None:
        if self.on_finished is not None:
            self.on_finished(self)
        if not self.gone:
            self._connection.finished()


Handler = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """A client connection, which reads requests and passes them to the handler one after another."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Request] = deque()
        self._current: Exchange | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self.keeps_alive = True

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and start its idle timer."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._wait_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the current exchange that the client has disconnected."""
        self._connections.discard(self)
        self._stop_idling()
        self._waiting.clear()
        self._transport = None
        exchange, self._current = self._current, None
        if exchange is not None:
            exchange.gone = True
            if exchange.on_gone is not None:
                exchange.on_gone()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._stop_idling()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, b"Upgrades are not supported.")
        except httptools.HttpParserError:
            self._refuse(400, b"Invalid HTTP request received.")

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Start a new request."""
        self._url, self._headers, self._body = b"", {}, bytearray()

    def on_url(self, url: bytes) -> None:
        """Append to the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Answer `Expect: 100-continue`."""
        if self._headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Append to the body."""
        self._body += data
        if len(self._body) > _MAX_BODY_BYTES:
            self._refuse(413, b"Request body too large.")

    def on_message_complete(self) -> None:
        """Handle the request, or queue it behind the current one."""
        self.keeps_alive = self._parser.should_keep_alive()
        path = httptools.parse_url(self._url).path or b"/"
        request = Request(
            self._parser.get_method().decode("latin-1"),
            path.decode("latin-1"),
            self._headers,
            bytes(self._body),
            self._loop.time(),
            self._parser.get_http_version() == "1.0",
        )
        if self._current is None:
            self._handle(request)
        else:
            self._waiting.append(request)

    # Called by the exchange.

    def send(self, data: bytes) -> None:
        """Write to the client; ignored if it has disconnected."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self) -> None:
        """Handle the next request, or wait for one."""
        self._current = None
        if not self.keeps_alive:
            self.close()
        elif self._waiting:
            self._handle(self._waiting.popleft())
        else:
            self._wait_idle()

    def close(self) -> None:
        """Close the connection after pending data has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _handle(self, request: Request) -> None:
        self._current = Exchange(self, request)
        self._handler(self._current)

    def _refuse(self, status: int, reason: bytes) -> None:
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-length: {len(reason)}\r\nconnection: close\r\n\r\n"
        self.send(head.encode() + reason)
        self.close()

    def _wait_idle(self) -> None:
        self._stop_idling()
        self._idle = self._loop.call_later(_KEEP_ALIVE_S, self.close)

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


class Listener:
    """A server that passes the requests on a port to a handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (chosen by the system if `port` is 0).

        Raises
        ------
        OSError
            If the port is taken or the host is not a local address.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections), host, port, backlog=2048
        )
        bound_port: int = self._server.sockets[0].getsockname()[1]
        return bound_port

    async def stop(self) -> None:
        """Stop listening, and abort all connections."""
        if self._server is not None:
            self._server.close()
            for connection in tuple(self._connections):
                connection.abort()
            await self._server.wait_closed()
            self._server = None


_date_cached: tuple[int, str] = (0, "")


def _date() -> str:
    global _date_cached  # noqa: PLW0603 -- formatted once a second
    now = int(time.time())
    if _date_cached[0] != now:
        _date_cached = (now, formatdate(now, usegmt=True))
    return _date_cached[1]
