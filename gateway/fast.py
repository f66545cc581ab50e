"""The fast door to the relay: uvicorn's own HTTP protocol, with the relay's paths taken before ASGI.

A request of the relay needs no scope, no task and no queue: its bytes go from uvicorn's parser to the relay, and the
relay's answer straight to the transport. All that leans on uvicorn's inner workings is here and in `gateway.cycle`;
`is_supported` says whether the uvicorn at hand has them. Where not, the gateway serves by its ASGI door alone.
"""

from __future__ import annotations

import inspect
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.cycle import RelayCycle
from gateway.envelope import Envelope
from gateway.headers import Header
from gateway.paths import is_own
from gateway.relay import Relay

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
    return True


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

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the last request, which refers to this protocol: nobody should have to look for the two."""
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]

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


def _origin_form(url: bytes) -> bytes:
    """Return the path and query of an absolute URL, as a client of a proxy sends it."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return b"/"
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
