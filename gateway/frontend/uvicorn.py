"""The fast door to the relay: uvicorn's own HTTP protocol, with the relay's paths taken before ASGI.

A request of the relay needs no scope, no task and no queue: its bytes go from uvicorn's parser to the relay, and the
relay's answer straight to the transport. All that leans on uvicorn's inner workings is here and in `request_cycle`;
`is_supported` says whether the uvicorn at hand has them. Where not, the gateway serves by its ASGI door alone.
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
_LEANS_ON = {
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
_LEANS_ON_SOURCE = {
    "connection_lost": ("self.cycle.disconnected = True", "self.cycle.message_event.set()"),
    "on_header": ("name = name.lower()", "self.headers.append((name, value))", "self.expect_100_continue = True"),
    "on_body": ("self.cycle.body += body", "self.cycle.message_event.set()"),
    "on_message_complete": ("self.cycle.more_body = False", "self.cycle.message_event.set()"),
    "on_response_complete": ("self.pipeline.pop()",),
    "shutdown": ("self.cycle.response_complete", "self.cycle.keep_alive = False"),
}


def is_supported() -> bool:
    """Say whether uvicorn's protocol is still built as this door takes it to be."""
    for name, parameters in _LEANS_ON.items():
        method = getattr(HttpToolsProtocol, name, None)
        if method is None or not parameters <= set(inspect.signature(method).parameters):
            return False
    try:
        for name, lines in _LEANS_ON_SOURCE.items():
            source = inspect.getsource(getattr(HttpToolsProtocol, name))
            if not all(line in source for line in lines):
                return False
    except (OSError, AttributeError):
        return False
    return True


def protocol_for(relay: RelayContext, max_body_bytes: int) -> type[HttpToolsProtocol]:
    """Return the protocol class that takes the relay's requests out of uvicorn's hands.

    Parameters
    ----------
    max_body_bytes
        Larger bodies are refused with 413.
    """
    return type("BoundRelayProtocol", (RelayProtocol,), {"relay": relay, "max_body_bytes": max_body_bytes})


class RelayProtocol(HttpToolsProtocol):
    """uvicorn's protocol; paths of the gateway's own go on to ASGI as ever."""

    relay: RelayContext
    max_body_bytes: int
    announced: bytes
    line: ClientConnection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        # uvicorn writes by it too, so that whatever is written to a client keeps its order.
        batched: Any = BatchedTransport(transport, self.relay.writes)
        super().connection_made(batched)
        shared = type(self)
        if shared.preamble is None:
            shared.preamble = Preamble(self.server_state)
        self.line = ClientConnection(self, batched, self.relay, shared.preamble, self.max_body_bytes)
        if shared.sweep is None:
            shared.sweep = self.loop.call_later(_SWEEP_S, shared.close_idle, self.server_state, self.loop)

    preamble: ClassVar[Preamble | None] = None
    sweep: ClassVar[asyncio.TimerHandle | None] = None

    @classmethod
    def close_idle(cls, state: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections that were idle too long: one timer for all, rather than two moves of one a request."""
        now_s = time.monotonic()
        for one in list(state.connections):
            since_s = one.line.idle_since_s
            if since_s and now_s - since_s > one.timeout_keep_alive:
                one.timeout_keep_alive_handler()
        cls.sweep = loop.call_later(_SWEEP_S, cls.close_idle, state, loop) if state.connections else None

    def data_received(self, data: bytes) -> None:
        """Relay a request with a head that is known; have any other parsed."""
        if not self.line.take(data):
            super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin a request; the ASGI scope is made later, if it turns out to be needed."""
        self.line.parsing()
        self.url = self.announced = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header, the length apart: without it, requests of one client have equal headers."""
        name = name.lower()
        if name == b"content-length":
            self.announced = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Decide whose request it is."""
        url = self.url if self.url.startswith(b"/") else _origin_form(self.url)
        path = url.partition(b"?")[0].decode("latin-1")
        if "%" in path:
            path = unquote(path)
        if is_own(path):
            self._leave_to_asgi()
            return
        line, existing = self.line, self.cycle
        cycle = line.cycle = RequestCycle(line, self._head_of_request(path, url))
        self.cycle = cycle  # type: ignore[assignment]
        if existing is None or existing.response_complete:
            cycle.start()
        else:  # pipelined: started when the one before is answered
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]

    def _head_of_request(self, path: str, url: bytes) -> RequestHead:
        parser, line = self.parser, self.line
        method = parser.get_method().decode("ascii")
        is_http_1_1 = parser.get_http_version() != "1.0"
        head = RequestHead(
            method,
            path,
            url,
            self.headers,
            announced=self.announced,
            expects=self.expect_100_continue,
            is_http_1_1=is_http_1_1,
            keep_alive=is_http_1_1 and parser.should_keep_alive(),
        )
        if (last := line.last) is not None and last.method == method and last.headers == head.headers:
            head.request_headers = last.request_headers
        line.learn(head)
        return head

    def on_message_complete(self) -> None:
        """Go on with a request that has come whole."""
        self.line.parsed()
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
            self.line.idle_since_s = time.monotonic()

    def _leave_to_asgi(self) -> None:
        self.line.forget()
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        if self.announced:
            headers.append((b"content-length", self.announced))
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the last request, which refers to this protocol: nobody should have to look for the two."""
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        self.line.close()

    def pause_writing(self) -> None:
        """Let the backend wait while the client is slow to read."""
        super().pause_writing()
        if isinstance(self.cycle, RequestCycle):
            self.cycle.pause()

    def resume_writing(self) -> None:
        """Let it go on."""
        super().resume_writing()
        if isinstance(self.cycle, RequestCycle):
            self.cycle.resume()


def _origin_form(url: bytes) -> bytes:
    """Return the path and query of an absolute URL, as a client of a proxy sends it."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return b"/"
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
