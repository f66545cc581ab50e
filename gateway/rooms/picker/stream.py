"""One stream of ext_proc, which is one HTTP request: the messages from the proxy and to it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import httpx

from backends import background
from backends.backend import Backend
from backends.http.client import Call
from gateway.dialects.errors import GatewayError, gateway_failed, nothing_here, too_large
from gateway.http.headers import ENGINE_PRIORITY, Header, headers_of, lines_of
from gateway.http.paths import canonical_path
from gateway.http.reply import Source
from gateway.relay.admission import begin
from gateway.relay.context import STOPPING
from gateway.relay.exchange import Exchange
from gateway.relay.roles import Sender, send_error
from gateway.rooms.picker import messages
from gateway.rooms.picker.destinations import Destinations
from gateway.rooms.picker.exchange import Picked
from gateway.rooms.picker.ext_proc_pb2 import HttpBody, ProcessingMode, ProcessingRequest
from gateway.rooms.picker.settings import PickerSettings
from gateway.rooms.picker.unfinished import Unfinished
from gateway.routing.access import RequestHeaders
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import Router

if TYPE_CHECKING:
    from gateway.gateway import Gateway

log = logging.getLogger(__name__)

_FULL_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
_NONE: Final = ProcessingMode.NONE
_KEYS: Final = frozenset({b"authorization", b"x-api-key"})
_STATES: Final = frozenset({"/health", "/readyz"})
_MARK: Final = b"x-gateway-"
_SHED: Final = frozenset({"gateway_full", "queue_full", "queue_timeout"})


class ProtocolError(Exception):
    """Raised if the proxy violates the protocol."""


class OwnAnswerTooLargeError(Exception):
    """Raised if the answer to one of the gateway's own paths is too large for one message to the proxy."""


class Picking:
    """State shared by the streams of a process."""

    def __init__(self, gateway: Gateway, destinations: Destinations, own: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.destinations = destinations
        self.own = own  # answers the gateway's own paths
        # The streams of requests that have been sent, by name of the request.
        self.streams: dict[str, Stream] = {}
        self.unfinished = Unfinished(lambda: gateway.settings.server)  # incomplete requests
        self._prefix = os.urandom(6).hex()
        self._names = 0

    @property
    def settings(self) -> PickerSettings:
        """The current settings; `gateway picker` adds the section if the pool file omits it."""
        found = PickerSettings.of(self.gateway.settings)
        assert found is not None
        return found

    def new_name(self) -> str:
        """Return a name for a request that is unique among all processes."""
        self._names += 1
        return f"{self._prefix}{self._names:x}"


class Stream:
    """A request on its way through the proxy."""

    def __init__(self, picking: Picking, send: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._picking = picking
        self._relay = picking.gateway.relay
        # _send: sends a `ProcessingResponse` after earlier ones; _end: ends the stream cleanly, once all are sent.
        self._send, self._end = send, end
        self._answering: asyncio.Task[None] | None = None
        self._method = ""
        self._target = b""
        self._headers: list[Header] = []
        self._request_headers: RequestHeaders | None = None
        self._subset: frozenset[str] | None = None
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._has_body = False
        self._has_trailers = False
        self.held_bytes = 0  # as `gateway.rooms.picker.unfinished.Upload`
        self.began_s = self.read_s = 0.0
        self._sender: ProxySender | None = None  # None until the request is complete
        self._source: Source | None = None  # source of the answer; None before and after
        self.exchange: Picked | None = None  # the exchange; None until the request has been routed
        self._passes_answer = True  # whether the body of the answer comes through this stream
        self._is_read = False
        self._most_bytes = picking.gateway.settings.server.max_body_bytes
        self._name = picking.new_name()
        self.has_ended = False  # whether the proxy was told to answer the client itself: no more can be sent
        self.is_observed = False  # whether another stream shows the answer and its end

    def handle(self, message: ProcessingRequest) -> None:
        """Handle one message of the proxy."""
        kind = message.WhichOneof("request")
        if kind == "response_body":
            self._on_response_body(message.response_body)
        elif kind == "request_body":
            self._on_request_body(message.request_body)
        elif kind == "request_headers":
            self._on_request_headers(message)
        elif kind == "response_headers":
            self._on_response_headers(message)
        elif kind == "request_trailers":
            self._has_trailers = True
            self._on_request_end()
        elif kind == "response_trailers":
            self._send(messages.RESPONSE_TRAILERS)
            if self.exchange is not None:
                self.exchange.on_end()
        else:
            raise ProtocolError("a message without headers, body or trailers")

    def close(self) -> None:
        """Handle the end of the stream: the request has ended, or was cancelled."""
        self._release_body()
        if self._answering is not None:
            self._answering.cancel()
        self._picking.streams.pop(self._name, None)
        if self._source is not None and not self.is_observed:
            self._source.client_gone()

    # The request

    def _on_request_headers(self, message: ProcessingRequest) -> None:
        if self._method:
            raise ProtocolError("headers of a second request: expected a stream for each")
        received = messages.headers_of(message.request_headers.headers)
        pseudo = {name: value for name, value in received if name.startswith(b":")}
        self._headers = [header for header in received if not header[0].startswith(b":")]
        self._method, self._target = pseudo.get(b":method", b"").decode("latin-1"), pseudo.get(b":path", b"")
        if not (self._method and self._target):
            raise ProtocolError("request headers without :method and :path")
        self._subset = messages.subset_of(message.metadata_context)
        is_last = message.request_headers.end_of_stream
        access = self._relay.access
        try:
            if message.HasField("protocol_config"):  # older proxies do not send it
                modes = message.protocol_config
                if not is_last:
                    _check_mode("request_body_mode", modes.request_body_mode, _FULL_DUPLEX)
                _check_mode("response_body_mode", modes.response_body_mode, _FULL_DUPLEX, _NONE)
                self._passes_answer = modes.response_body_mode == _FULL_DUPLEX
            path = canonical_path(self._target)
            if not (access.is_for_clients(path) or path in _STATES):  # operators use the gateway's own address
                raise nothing_here()
            self._request_headers = access.admit(self._method, self._target, self._headers)
            length = dict(self._headers).get(b"content-length", b"")
            if length.isdigit() and int(length) > self._most_bytes:
                raise too_large(self._most_bytes)
        except GatewayError as error:
            self.refuse(error)
            return
        if is_last:
            self._on_request_end()
            return
        self._picking.unfinished.begin(self)

    async def _answer_itself(self, body: bytes) -> None:
        """Answer one of the gateway's own paths."""
        try:
            target = self._target.decode("latin-1")
            answer = await self._picking.own.request(self._method, target, headers=self._headers, content=body)
        except Exception as error:  # noqa: BLE001 -- the proxy needs some answer
            known = gateway_failed()
            if isinstance(error, OwnAnswerTooLargeError):
                known = GatewayError(413, str(error), code="answer_too_large")
            else:
                background.note("own paths", error)
            send_error(self, known, canonical_path(self._target), self._relay.new_request_id())
            return
        lines = lines_of(header for header in answer.headers.raw if header[0] != b"content-length")
        self.whole(answer.status_code, lines, answer.content)

    def _on_request_body(self, piece: HttpBody) -> None:
        if self.has_ended or self._answering is not None or self._sender is not None:
            return  # Envoy may send the last piece twice: https://github.com/envoyproxy/envoy/issues/46237
        if not self._method:
            raise ProtocolError("a piece of a request's body before its headers")
        self._has_body = True
        body = piece.body  # each access copies it
        if body:  # the last piece may be empty
            self._parts.append(body)
        self._size_bytes += len(body)
        if self._size_bytes > self._most_bytes:
            self.refuse(too_large(self._most_bytes))
            return
        self._picking.unfinished.hold(self, len(body))
        if self.has_ended:
            return  # it held the most, and was refused
        if piece.end_of_stream:
            self._on_request_end()

    def _on_request_end(self) -> None:
        """Choose a backend, now or once one is free."""
        if self.has_ended or self._answering is not None:
            return
        headers, picking = self._request_headers, self._picking
        if not self._method or self._sender is not None:
            raise ProtocolError("the end of a request before its headers, or a second one")
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._release_body()
        if headers is None:
            self._answering = background.start("own paths", self._answer_itself(body))
            return
        self._sender = ProxySender(self, picking.destinations, self._subset, picking.settings.fallbacks)
        begin(self._relay, headers, body, self, self._sender)

    def _release_body(self) -> None:
        self._picking.unfinished.release(self)
        self._parts.clear()

    def refuse(self, error: GatewayError) -> None:
        """Answer a request that was not admitted."""
        self._release_body()
        self._relay.refuse(self, self._relay.access, error, self._method, self._target, self._headers)

    # Called by the relay: see `gateway.relay.roles.Reply` and `ProxySender`

    def answered_by(self, source: Source) -> None:
        """Set what answers the request."""
        self._source, picking = source, self._picking
        if isinstance(source, Exchange):
            self._source = self.exchange = Picked(source, picking.destinations, picking.settings.answers)

    def forward(self, upstream: Upstream, destinations: str, body: bytes, lines: bytes, engine_id: bytes) -> None:
        """Send the proxy the destinations of the request, in the order to try."""
        request = self._request_headers
        assert request is not None
        names = {name for name, _ in self._headers}
        headers: list[Header] = []
        removed = {name for name in names if name.startswith(_MARK)} - {messages.DESTINATION.encode()}
        removed |= names & {ENGINE_PRIORITY}
        if upstream.backend.api_key is not None:
            headers.append((b"authorization", f"Bearer {upstream.backend.api_key}".encode()))
            removed |= names & {b"x-api-key"}
        elif not self._relay.access.keyring.is_open:
            removed |= names & _KEYS
        headers.append((b"x-request-id", engine_id))
        if request.target != self._target:
            headers.append((b":path", request.target))
        if len(body) != self._size_bytes and b"content-length" in names:
            headers.append((b"content-length", b"%d" % len(body)))
        if lines is not request.lines:  # the gateway traces the request
            headers += [header for header in headers_of(lines) if header[0] == b"traceparent"]
        self._picking.streams[self._name] = self
        self._send(messages.forward(destinations, self._name, headers, sorted(map(bytes.decode, removed))))
        if self._has_body:
            for piece in messages.request_body(body, is_last=not self._has_trailers):
                self._send(piece)
        if self._has_trailers:
            self._send(messages.REQUEST_TRAILERS)

    def head(self, status: int, lines: bytes) -> None:
        """Pass on nothing: the proxy does."""

    def data(self, chunk: bytes) -> None:
        """Pass on nothing: the proxy does."""

    def end(self) -> None:
        """Pass on nothing: the proxy does."""

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send the proxy a whole answer to pass on to its client, such as an error."""
        if not self.has_ended:
            self.has_ended = True
            self._send(messages.immediate(status, headers_of(lines), body))
            self._end()

    def leave(self) -> None:
        """End the stream without an error, so that the proxy can finish the answer after this process has stopped."""
        self.has_ended = True
        self._end()

    def abort(self) -> None:
        """Abort the answer."""
        self.whole(502, b"", b"")

    # The answer

    def _on_response_headers(self, message: ProcessingRequest) -> None:
        exchange = self.exchange
        if exchange is None or not exchange.is_sent:  # the answer is the proxy's own
            self._send(messages.response_headers([]))
            return
        is_last = message.response_headers.end_of_stream
        self._is_read = is_last or (self._passes_answer and exchange.needs_answer())
        self.on_answer_begun(message, is_read=self._is_read)
        if not self.has_ended:
            self._send(messages.response_headers(headers_of(exchange.lines_for_client())))
        if is_last:
            exchange.on_end()

    def on_answer_begun(self, message: ProcessingRequest, *, is_read: bool) -> None:
        """Handle the headers of the answer; called again if another stream shows its body."""
        assert self.exchange is not None
        if served := messages.text_of(message.metadata_context, messages.SERVED):
            self.exchange.served_by(served)
        received = messages.headers_of(message.response_headers.headers)
        status = next((int(value) for name, value in received if name == b":status" and value.isdigit()), 0)
        self.exchange.on_head(
            status, [header for header in received if not header[0].startswith(b":")], is_read=is_read
        )

    def _on_response_body(self, piece: HttpBody) -> None:
        """Pass on a piece of the answer, then read it."""
        body, is_last = piece.body, piece.end_of_stream
        self._send(messages.response_body(body, is_last=is_last))
        if self.exchange is None or self.has_ended:
            return
        if self._is_read and body:
            self.exchange.on_data(body)
        if is_last:
            self.exchange.on_end()


class ProxySender(Sender):
    """Sends requests through a proxy, which may choose another of their destinations."""

    is_relayed: ClassVar[bool] = False

    def __init__(
        self, stream: Stream, destinations: Destinations, subset: Collection[str] | None, fallbacks: int
    ) -> None:
        self._stream = stream
        self._destinations = destinations
        self._subset = subset  # the destinations that the proxy allows; None for all
        self._fallbacks = fallbacks

    def candidates(
        self, router: Router, routed: RoutedRequest, tried: tuple[str, ...], *, may_try: bool
    ) -> list[Backend]:
        """Return the candidates whose destination is known and allowed."""
        for tries in (True, False) if may_try else (False,):  # a backend on trial, offered alone, may not be allowed
            found = router.candidates(routed, tried, may_try=tries)
            if allowed := [backend for backend in found if self._is_allowed(backend)]:
                return allowed
        of = "that the proxy allows is up" if self._subset is not None else "has a known address"
        raise GatewayError(503, f"No endpoint {of}. Try again shortly.", code="no_backend", retry_after_s=2.0)

    def _is_allowed(self, backend: Backend) -> bool:
        destination = self._destinations.of(backend)
        return destination != "" and (self._subset is None or destination in self._subset)

    def send(
        self, call: Call, upstream: Upstream, candidates: Sequence[Backend], lines: bytes, engine_id: bytes
    ) -> None:
        """Forward the request to a backend; the proxy falls back on other candidates, the least loaded first."""
        chosen = upstream.backend
        others = sorted(
            (each for each in candidates if each is not chosen), key=lambda each: each.in_flight / each.weight
        )
        named = [self._destinations.of(each) for each in (chosen, *others[: self._fallbacks])]
        self._stream.forward(upstream, ",".join(dict.fromkeys(named)), call.body, lines, engine_id)

    def shown(self, error: GatewayError) -> GatewayError:
        """Return an error by the protocol: 429 for requests dropped under load, 503 without a replica."""
        if error.code not in _SHED:
            return error
        return GatewayError(429, error.message, code=error.code, retry_after_s=error.retry_after_s)

    def goes_on(self, error: GatewayError) -> bool:
        """Leave an unread answer to the proxy if this process stops; return whether it does."""
        exchange = self._stream.exchange
        if error.code != STOPPING or (exchange is not None and exchange.is_read):
            return False
        self._stream.leave()
        return True

    def cut_off(self) -> None:
        """Abort the answer that the proxy passes on."""
        self._stream.abort()


def _check_mode(setting: str, mode: int, *allowed: int) -> None:
    """Raise 500 if the proxy sends bodies in a mode that the picker does not support."""
    if mode not in allowed:
        name, needed = ProcessingMode.BodySendMode.Name, " or ".join(map(ProcessingMode.BodySendMode.Name, allowed))
        log.error("the proxy's %s is %s: set %s in its ext_proc filter", setting, name(mode), needed)
        message = f"The proxy's {setting} is {name(mode)}; the picker needs {needed}."
        raise GatewayError(500, message, code="proxy_misconfigured")
