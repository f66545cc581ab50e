"""Simulated vLLM's HTTP: requests and their answers on `backends.http.server`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from backends.http.server import HttpReply, HttpServer, ServerLimits

_LIMITS = ServerLimits(idle_s=5.0, stall_s=math.inf, connections=1_000_000)  # as in vLLM's server

Headers = list[tuple[str, str]]
Handler = Callable[["Exchange"], None]


@dataclass(slots=True)
class Request:
    """A complete request."""

    method: str
    path: str  # decoded, without the query
    query: str
    headers: dict[str, str]  # by lower-case name; of repeated headers the last counts
    body: bytes
    received_s: float  # time of completion, on the event loop's clock


class Exchange:
    """A request and its answer: either one `respond`, or `start`, any number of `write`s, and `end`.

    When the client disconnects, `gone` becomes true and `on_gone` is called; further writes are ignored.
    """

    def __init__(self, reply: HttpReply, body: bytes) -> None:
        head, now_s = reply.request, asyncio.get_running_loop().time()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        self._reply = reply
        query = head.target.partition(b"?")[2].decode("latin-1")
        self.request = Request(head.method, head.path, query, headers, body, now_s)
        self.answer_headers: Headers = []
        self.gone = False
        self.status = 0  # status of the answer; 0 before it begins
        self.on_gone: Callable[[], object] | None = None
        self.on_finished: Callable[[Exchange], None] | None = None
        reply.source = self

    @property
    def started(self) -> bool:
        """Whether the answer has begun."""
        return self.status != 0

    def respond(self, status: int, body: bytes, content_type: str | None = "application/json") -> None:
        """Send a complete answer."""
        headers: Headers = [] if content_type is None else [("content-type", content_type)]
        self.status = status
        if not self.gone:
            self._reply.whole(status, self._lines(headers), body)
        self._finish()

    def start(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Begin a streamed answer."""
        self.status = 200
        if not self.gone:
            self._reply.head(200, self._lines([("content-type", content_type)]))
            self._reply.send_head()

    def write(self, data: bytes) -> None:
        """Write bytes of a streamed answer as one chunk."""
        if not self.gone:
            self._reply.data(data)

    def end(self, data: bytes = b"") -> None:
        """Send the last bytes of a streamed answer and end it."""
        if not self.gone:
            self._reply.data(data)
            self._reply.end()
        self._finish()

    def _lines(self, headers: Headers) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in [*headers, *self.answer_headers]])
        return lines.encode("latin-1", "replace")

    def _finish(self) -> None:
        if self.on_finished is not None:
            self.on_finished(self)

    # Called by the connection

    def client_gone(self) -> None:
        """Stop the answer."""
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()

    def pause(self) -> None:
        """Do nothing: an engine goes on, however slow its client."""

    def resume(self) -> None:
        """Do nothing, as in `pause`."""


class Listener:
    """A server that passes the requests on a port to a handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._http = HttpServer(self, _LIMITS, extra_lines=b"server: simulated-vllm\r\n")
        self._server: asyncio.Server | None = None

    def admit(self, reply: HttpReply) -> None:
        """Accept any request."""

    def handle(self, reply: HttpReply, body: bytes) -> None:
        """Pass a request to the handler."""
        self._handler(Exchange(reply, body))

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        """Answer what is not a request."""
        reply.whole(status, b"content-type: text/plain\r\n", reason.encode())

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (chosen by the system if `port` is 0)."""
        connect = cast("Callable[[], asyncio.Protocol]", self._http.connect)
        self._server = await asyncio.get_running_loop().create_server(connect, host, port, backlog=2048)
        bound_port: int = self._server.sockets[0].getsockname()[1]
        return bound_port

    async def stop(self) -> None:
        """Stop listening, and abort all connections."""
        if self._server is not None:
            self._server.close()
            for connection in tuple(self._http.connections):
                connection.abort()
            await self._server.wait_closed()
            self._server = None
