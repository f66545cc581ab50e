"""An HTTP/1.1 server of callbacks over `asyncio.Protocol` and httptools.

A stream's chunk goes from the engine's step to the socket in one call, without a task to wake or a queue between:
that is what lets one process hold hundreds of streams on time.
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

_KEEP_ALIVE_S = 5.0  # as vLLM's server has it
_MAX_BODY_BYTES = 64 * 2**20
_PHRASES = {status.value: status.phrase for status in HTTPStatus}

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Request:
    """A request that has come in whole.

    Parameters
    ----------
    headers
        By lower-case name; of repeated ones the last counts.
    received_s
        When it was complete, on the event loop's clock.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    received_s: float
    http_1_0: bool = False


class Exchange:
    """A request and the answer to it: either `respond`, or `start`, any number of `write`, and `end`.

    Once the client has left, `gone` is true, `on_gone` has been called, and writing does nothing.
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
        """Send the whole answer."""
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
        """Send bytes of a streamed answer, as one chunk."""
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
    """One client's connection: reads requests, hands them to the handler one after another."""

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

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._wait_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange under way that its client has left."""
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
        """Parse what came."""
        self._stop_idling()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, b"Upgrades are not supported.")
        except httptools.HttpParserError:
            self._refuse(400, b"Invalid HTTP request received.")

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Start a request."""
        self._url, self._headers, self._body = b"", {}, bytearray()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Tell a client that waits for it to go on with the body."""
        if self._headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._body += data
        if len(self._body) > _MAX_BODY_BYTES:
            self._refuse(413, b"Request body too large.")

    def on_message_complete(self) -> None:
        """Hand the request on, or queue it behind the one under way."""
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

    # What the exchange calls.

    def send(self, data: bytes) -> None:
        """Write to the client; nothing if it has left."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self) -> None:
        """Go on to the next request, or wait for one."""
        self._current = None
        if not self.keeps_alive:
            self.close()
        elif self._waiting:
            self._handle(self._waiting.popleft())
        else:
            self._wait_idle()

    def close(self) -> None:
        """Close the connection when what was written is sent."""
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
    """A handler that listens on a port."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (of the system's choice if `port` is 0).

        Raises
        ------
        OSError
            If the port is taken or the host is none of ours.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections), host, port, backlog=2048
        )
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    async def stop(self) -> None:
        """Stop listening, and break every connection."""
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
