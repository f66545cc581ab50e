"""The fast door to the relay: uvicorn's own HTTP protocol, with the relay's paths taken before ASGI.

A request of the relay needs no scope, no task and no queue: its bytes go from uvicorn's parser to the relay, and the
relay's answer straight to the transport. All that leans on uvicorn's inner workings is in this file. `is_supported`
says whether the uvicorn at hand has them; where not, the gateway serves by its ASGI door alone.
"""

from __future__ import annotations

import inspect
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.envelope import Envelope
from gateway.exchange import Exchange
from gateway.headers import Header
from gateway.openai import GatewayError, endpoint_of, too_large
from gateway.paths import is_own
from gateway.relay import Inbound, Relay

_LINGER_S = 2.0
_NO_BODY_STATUSES = frozenset({204, 304})
_LEANS_ON = {
    "__init__": {"config", "server_state", "app_state"},
    "on_header": {"name", "value"},
    "on_message_begin": set[str](),
    "on_headers_complete": set[str](),
    "on_response_complete": set[str](),
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
    return hasattr(httptools_impl, "STATUS_LINE")


def protocol_for(relay: Relay, max_body_bytes: int) -> type[HttpToolsProtocol]:
    """Return the protocol class that takes the relay's requests out of uvicorn's hands.

    Parameters
    ----------
    max_body_bytes
        Larger bodies are refused with 413.
    """
    return type("BoundRelayProtocol", (RelayProtocol,), {"relay": relay, "max_body_bytes": max_body_bytes})


class RelayProtocol(HttpToolsProtocol):
    """uvicorn's protocol; paths of the gateway's own go on to ASGI as ever."""

    relay: Relay
    max_body_bytes: int
    announced: bytes
    envelope: Envelope | None = None  # of the last request: most clients send the same headers each time

    def on_message_begin(self) -> None:
        """Begin a request; the ASGI scope is made later, if it turns out to be needed."""
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

    def envelope_of(self, method: str, headers: list[Header]) -> Envelope:
        """Read the headers of a request of the relay; raises as `Relay.identify` does."""
        envelope = self.envelope
        if envelope is None or not envelope.is_of(method, headers):
            envelope = self.envelope = self.relay.envelope(method, headers)
        return envelope

    def on_headers_complete(self) -> None:
        """Decide whose request it is."""
        url = self.url if self.url.startswith(b"/") else _origin_form(self.url)
        path = url.partition(b"?")[0].decode("latin-1")
        if "%" in path:
            path = unquote(path)
        if is_own(path):
            self._leave_to_asgi()
            return
        existing = self.cycle
        cycle = self.cycle = RelayCycle(self, url, path)  # type: ignore[assignment]
        if existing is None or existing.response_complete:
            cycle.start()
        else:  # pipelined: uvicorn starts it when the one before is answered
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]

    def _leave_to_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        if self.announced:
            headers.append((b"content-length", self.announced))
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Let the backend wait while the client is slow to read."""
        super().pause_writing()
        if isinstance(self.cycle, RelayCycle):
            self.cycle.pause()

    def resume_writing(self) -> None:
        """Let it go on."""
        super().resume_writing()
        if isinstance(self.cycle, RelayCycle):
            self.cycle.resume()


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
        head = httptools_impl.STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in sent])
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


def _origin_form(url: bytes) -> bytes:
    """Return the path and query of an absolute URL, as a client of a proxy sends it."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return b"/"
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
