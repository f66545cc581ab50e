"""The fast frontend: uvicorn's HTTP protocol, which passes relayed requests to the relay without ASGI.

A relayed request needs no scope, task or queue: uvicorn's parser passes it to the relay, and the relay writes the
answer to the transport. All dependencies on uvicorn's internals are here and in `request_cycle`; `is_supported` checks
them against the installed uvicorn. If they do not hold, the gateway serves through its ASGI frontend alone.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from backends.http.write_batch import BatchedTransport
from gateway.frontend.connection import ClientConnection, Preamble
from gateway.frontend.request_cycle import RequestCycle
from gateway.http.paths import is_own
from gateway.relay.context import RelayContext
from gateway.routing.request_head import RequestHead

_SWEEP_S = 5.0
_REQUIRED_PARAMETERS = {
    "__init__": {"config", "server_state", "app_state"},
    "on_header": {"name", "value"},
    "on_message_begin": set[str](),
    "on_headers_complete": set[str](),
    "on_message_complete": set[str](),
    "on_response_complete": set[str](),
    "timeout_keep_alive_handler": set[str](),
    "connection_made": {"transport"},
    "data_received": {"data"},
    "pause_writing": set[str](),
    "resume_writing": set[str](),
}
_REQUIRED_SOURCE = {
    "connection_lost": ("self.cycle.disconnected = True", "self.cycle.message_event.set()"),
    "on_header": ("name = name.lower()", "self.headers.append((name, value))", "self.expect_100_continue = True"),
    "on_body": ("self.cycle.body += body", "self.cycle.message_event.set()"),
    "on_message_complete": ("self.cycle.more_body = False", "self.cycle.message_event.set()"),
    "on_response_complete": ("self.pipeline.pop()",),
    "shutdown": ("self.cycle.response_complete", "self.cycle.keep_alive = False"),
}


def is_supported() -> bool:
    """Return whether uvicorn's protocol has the internals that this frontend depends on."""
    for name, parameters in _REQUIRED_PARAMETERS.items():
        method = getattr(HttpToolsProtocol, name, None)
        if method is None or not parameters <= set(inspect.signature(method).parameters):
            return False
    try:
        for name, lines in _REQUIRED_SOURCE.items():
            source = inspect.getsource(getattr(HttpToolsProtocol, name))
            if not all(line in source for line in lines):
                return False
    except (OSError, AttributeError):
        return False
    return True


def protocol_for(relay: RelayContext, max_body_bytes: int) -> type[HttpToolsProtocol]:
    """Return a uvicorn protocol class that passes requests to a relay.

    Parameters
    ----------
    max_body_bytes
        Limit of a request body; larger ones are refused with 413.
    """
    return type("BoundRelayProtocol", (RelayProtocol,), {"relay": relay, "max_body_bytes": max_body_bytes})


class RelayProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a relay; paths that the gateway answers itself go through ASGI as usual."""

    relay: RelayContext
    max_body_bytes: int
    content_length: bytes
    client_connection: ClientConnection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection."""
        # uvicorn writes through it too, so that all writes to a client stay in order.
        batched: Any = BatchedTransport(transport, self.relay.writes)
        super().connection_made(batched)
        shared = type(self)
        if shared.preamble is None:
            shared.preamble = Preamble(self.server_state)
        self.client_connection = ClientConnection(self, batched, self.relay, shared.preamble, self.max_body_bytes)
        if shared.sweep is None:
            shared.sweep = self.loop.call_later(_SWEEP_S, shared.close_idle, self.server_state, self.loop)

    preamble: ClassVar[Preamble | None] = None
    sweep: ClassVar[asyncio.TimerHandle | None] = None

    @classmethod
    def close_idle(cls, state: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Close idle connections after their keep-alive time; one timer for all avoids two timer changes a request."""
        now_s = time.monotonic()
        for protocol in list(state.connections):
            idle_since_s = protocol.client_connection.idle_since_s
            if idle_since_s and now_s - idle_since_s > protocol.timeout_keep_alive:
                protocol.timeout_keep_alive_handler()
        cls.sweep = loop.call_later(_SWEEP_S, cls.close_idle, state, loop) if state.connections else None

    def data_received(self, data: bytes) -> None:
        """Relay a request with a known head; have any other parsed."""
        if not self.client_connection.receive_unparsed(data):
            super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin a request; its ASGI scope is created later, if needed."""
        self.client_connection.message_begun()
        self.url = self.content_length = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; the content length separately, since the other headers are often those of the last request."""
        name = name.lower()
        if name == b"content-length":
            self.content_length = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Pass the request to the relay, or to ASGI if the gateway answers its path itself."""
        url = self.url if self.url.startswith(b"/") else _origin_form(self.url)
        path = url.partition(b"?")[0].decode("latin-1")
        if "%" in path:
            path = unquote(path)
        if is_own(path):
            self._leave_to_asgi()
            return
        connection, existing = self.client_connection, self.cycle
        cycle = connection.cycle = RequestCycle(connection, self._head_of_request(path, url))
        self.cycle = cycle  # type: ignore[assignment]
        if existing is None or existing.response_complete:
            cycle.start()
        else:  # pipelined: started when the previous request has been answered
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]

    def _head_of_request(self, path: str, url: bytes) -> RequestHead:
        parser, connection = self.parser, self.client_connection
        method = parser.get_method().decode("ascii")
        is_http_1_1 = parser.get_http_version() != "1.0"
        head = RequestHead(
            method,
            path,
            url,
            self.headers,
            content_length=self.content_length,
            expects_continue=self.expect_100_continue,
            is_http_1_1=is_http_1_1,
            keep_alive=is_http_1_1 and parser.should_keep_alive(),
        )
        if (last := connection.last_head) is not None and last.method == method and last.headers == head.headers:
            head.request_headers = last.request_headers
        connection.learn_head(head)
        return head

    def on_message_complete(self) -> None:
        """Continue with a request whose body is complete."""
        self.client_connection.message_complete()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, or wait for it."""
        if self.pipeline and not self.transport.is_closing() and isinstance(self.pipeline[-1][0], RequestCycle):
            self.flow.resume_reading()
            self.loop.call_soon(self.pipeline.pop()[0].start)
        elif self.pipeline:
            super().on_response_complete()
        else:
            self.flow.resume_reading()
            self.client_connection.idle_since_s = time.monotonic()

    def _leave_to_asgi(self) -> None:
        self.client_connection.forget_head()
        url, headers, expects_continue = self.url, self.headers, self.expect_100_continue
        if self.content_length:
            headers.append((b"content-length", self.content_length))
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects_continue
        self.scope["headers"] = headers
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the last request: it refers to this protocol, and the cycle would wait for the garbage collector."""
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        self.client_connection.close()

    def pause_writing(self) -> None:
        """Pause reading from the backend while the client is slow to read."""
        super().pause_writing()
        if isinstance(self.cycle, RequestCycle):
            self.cycle.pause()

    def resume_writing(self) -> None:
        """Resume reading from the backend."""
        super().resume_writing()
        if isinstance(self.cycle, RequestCycle):
            self.cycle.resume()


def _origin_form(url: bytes) -> bytes:
    """Return the path and query of an absolute URL, the form that clients send to a proxy."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return b"/"
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
