"""The gRPC services of the endpoint picker: Envoy's external processing, and health."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final

import grpc
import httpx
from google.protobuf.message import DecodeError
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends import background
from backends.http.address import host_and_port
from gateway.listening.certificate import PATIENCE_S, Certificate
from gateway.rooms.picker.destinations import Destinations
from gateway.rooms.picker.exchange import Picked
from gateway.rooms.picker.ext_proc_pb2 import ProcessingRequest
from gateway.rooms.picker.messages import REQUEST, text_of
from gateway.rooms.picker.stream import OwnAnswerTooLargeError, Picking, ProtocolError, Stream

if TYPE_CHECKING:
    from gateway.gateway import Gateway


SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVE: Final = "liveness"
_READY: Final = ("readiness", SERVICE, "")
_CHECK_S: Final = 0.5
_CLOSE_S: Final = 1.0  # after the relay has ended the requests in flight
_MOST_CALLS: Final = 16_384
_MOST_OWN_BYTES: Final = 64 << 20
_OPTIONS: Final = (
    ("grpc.max_concurrent_streams", 1024),  # per connection; a proxy opens another one for more
    ("grpc.max_allowed_incoming_connections", 1024),
    ("grpc.max_connection_idle_ms", 60_000),  # so that extra connections close
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 8 << 20),  # more than deploy/envoy/picker.yaml buffers: pieces may exceed that
    # Initial window of a call: prompts arrive at once, and a growing window costs round trips.
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.bdp_probe", 0),
    # Both sides may ping the other, even without calls.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


class Observation:
    """An answer that a proxy shows. When the stream ends, the proxy shows no more, but the answer continues."""

    def __init__(self, picking: Picking) -> None:
        self._picking = picking
        self._exchange: Picked | None = None
        self.has_ended = False  # whether no more needs to be shown

    def handle(self, message: ProcessingRequest) -> None:
        """Handle one message of the proxy, which expects no answer."""
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            self._begin(message)
        elif self._exchange is None or kind == "response_trailers":
            self.has_ended = True
        elif kind == "response_body":
            self._exchange.on_data(message.response_body.body)
            self.has_ended = message.response_body.end_of_stream
        if self.has_ended and self._exchange is not None:
            self._exchange.on_end()

    def _begin(self, message: ProcessingRequest) -> None:
        stream = self._picking.streams.get(text_of(message.metadata_context, REQUEST))
        if stream is None or stream.exchange is None or not stream.exchange.needs_answer():
            self.has_ended = True  # another process may know the request
            return
        self._exchange, stream.is_observed = stream.exchange, True
        stream.on_answer_begun(message, is_read=True)
        self.has_ended = message.response_headers.end_of_stream

    def close(self) -> None:
        """Handle the end of the stream: the answer has ended, or was cut off."""
        if self._exchange is not None:
            self._exchange.client_gone()


class Call:
    """Passes the proxy's messages to a stream, and writes its answers: immediately, or from a task if they come later.

    It reads no message while the proxy does not receive those sent to it.
    """

    def __init__(self, picking: Picking, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._picking = picking
        self._context = context
        self._reader = asyncio.current_task()
        self._stream: Stream | Observation | None = None
        self._unsent: deque[bytes] = deque()
        self._turn = asyncio.Lock()  # held to write
        self._late: asyncio.Task[None] | None = None
        self._has_ended = False

    async def serve(self) -> None:
        """Serve the call until either side ends it."""
        try:
            while not self._has_ended:
                data = await self._context.read()
                if not isinstance(data, bytes):  # the end
                    break
                self._handle(data)
                await self._write()
        except (ProtocolError, DecodeError) as error:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not self._has_ended:  # else `_write_late` ended it
                raise
        finally:
            self._has_ended = True
            if self._late is not None:
                self._late.cancel()
            stream, self._stream = self._stream, None  # break the cycle, which holds the body
            if stream is not None:
                stream.close()

    def _handle(self, data: bytes) -> None:
        message = ProcessingRequest.FromString(data)
        if self._stream is None:
            is_shown = message.observability_mode
            self._stream = Observation(self._picking) if is_shown else Stream(self._picking, self.send, self.end)
        self._stream.handle(message)
        self._has_ended = self._has_ended or self._stream.has_ended

    def send(self, message: bytes) -> None:
        """Send a message after earlier ones."""
        self._unsent.append(message)
        self._wake()

    def end(self) -> None:
        """End the call cleanly, once all messages have been sent."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._late is None and asyncio.current_task() is not self._reader:
            self._late = background.start("picker", self._write_late(), of="a call", raises=grpc.aio.BaseError)

    async def _write(self) -> None:
        async with self._turn:
            while self._unsent:
                await self._context.write(self._unsent.popleft())

    async def _write_late(self) -> None:
        await self._write()
        self._late = None
        if self._has_ended and self._reader is not None:
            self._reader.cancel()


class PickerServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and `grpc.health.v1.Health` for a gateway process."""

    def __init__(self, gateway: Gateway, own: ASGIApp) -> None:
        self._gateway = gateway
        client = httpx.AsyncClient(transport=httpx.ASGITransport(bounded(own)), base_url="http://gateway")
        self._picking = Picking(gateway, Destinations(gateway.pool), client)
        self._health = health.HealthServicer()
        self._is_draining = False
        self._work: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, opened: socket.socket) -> None:
        """Accept calls at the address of a bound socket, with TLS if the settings say so."""
        settings = self._gateway.settings.server
        server = self._server = grpc.aio.server(
            options=[*_OPTIONS, ("grpc.so_reuseport", settings.workers > 1 or settings.reuse_port)],
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Process": grpc.stream_stream_rpc_method_handler(self._process)
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        add_HealthServicer_to_server(self._health, server)
        destinations = self._picking.destinations
        await destinations.look_up()
        await self._health.set(_LIVE, HealthCheckResponse.SERVING)
        await self._check()
        self._listen(server, opened)
        await server.start()
        self._work = [
            background.keep_running("picker", self._check_regularly, of="its health"),
            background.keep_running("picker", destinations.look_up_regularly, of="destinations"),
        ]

    def _listen(self, server: grpc.aio.Server, opened: socket.socket) -> None:
        """Listen with gRPC at the address of a bound socket, which gRPC cannot adopt."""
        host, port = opened.getsockname()[:2]
        address = host_and_port(host, port)
        opened.close()
        if (tls := self._picking.settings.tls) is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(Certificate(tls, "picker.tls")))

    async def _process(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await Call(self._picking, context).serve()

    def drain(self) -> None:
        """Signal that no more requests should be sent."""
        self._is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, and wait for open ones."""
        if self._server is not None:
            await self._server.stop(grace_s + _CLOSE_S)
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._picking.own.aclose()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._check()
            self._picking.unfinished.check(time.monotonic())

    async def _check(self) -> None:
        """Publish whether any replica can serve."""
        is_ready = not self._is_draining and any(self._gateway.pool.up(name) for name in self._gateway.models)
        for service in _READY:
            await self._health.set(
                service, HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
            )


def bounded(own: ASGIApp) -> ASGIApp:
    """Return an application that stops an answer too large to be held whole, such as the output of a batch."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        left_bytes = _MOST_OWN_BYTES

        async def send_part(message: Message) -> None:
            nonlocal left_bytes
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                text = f"Through a proxy, an answer of the gateway has at most {_MOST_OWN_BYTES >> 20} MiB"
                raise OwnAnswerTooLargeError(f"{text}: ask it directly.")
            await send(message)

        await own(scope, receive, send_part)

    return answer


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return server credentials that check for replaced files before each handshake."""
    shown = certificate.pem

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (looking := certificate.look()) is not None:
            wait([looking], timeout=PATIENCE_S)
        if shown is certificate.pem:
            return None
        shown = certificate.pem
        return grpc.ssl_server_certificate_configuration([shown])

    first = grpc.ssl_server_certificate_configuration([shown])
    return grpc.dynamic_ssl_server_credentials(first, renewed)  # type: ignore[arg-type] # None keeps it
