"""The gRPC services of the endpoint picker: Envoy's external processing, and health."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final

import grpc
import httpx
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from starlette.types import ASGIApp

from backends import background
from backends.http.address import host_and_port
from gateway.listening.certificate import PATIENCE_S, Certificate
from gateway.rooms.picker.call import Call
from gateway.rooms.picker.destinations import Destinations
from gateway.rooms.picker.stream import Picking

if TYPE_CHECKING:
    from gateway.gateway import Gateway

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVE: Final = "liveness"
_READY: Final = ("readiness", SERVICE, "")
_CHECK_S: Final = 0.5
_CLOSE_S: Final = 1.0  # after the relay has ended what is in flight

_MOST_CALLS: Final = 16_384
_OPTIONS: Final = (
    ("grpc.max_concurrent_streams", 1024),  # of a connection; a proxy opens another one for more
    ("grpc.max_allowed_incoming_connections", 1024),
    ("grpc.max_connection_idle_ms", 60_000),  # so that those do not stay
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 4 << 20),
    # The window of a call from its beginning: prompts come at once, and a window that grows costs waiting.
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.bdp_probe", 0),
    # Both sides may ask whether the other is still there, also without calls.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


class PickerServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and `grpc.health.v1.Health` for a gateway process."""

    def __init__(self, gateway: Gateway, own: ASGIApp) -> None:
        self._gateway = gateway
        client = httpx.AsyncClient(transport=httpx.ASGITransport(own), base_url="http://gateway")
        self._picking = Picking(gateway, Destinations(), client)
        self._health = health.HealthServicer()
        self._is_draining = False
        self._checks: asyncio.Task[None] | None = None
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
        await self._picking.destinations.start(self._gateway.pool)
        await self._health.set(_LIVE, HealthCheckResponse.SERVING)
        await self._check()
        self._listen(server, opened)
        await server.start()
        self._checks = background.keep_running("picker", self._check_regularly, of="its health")

    def _listen(self, server: grpc.aio.Server, opened: socket.socket) -> None:
        """Listen with gRPC where a socket is bound, which it cannot take over."""
        host, port = opened.getsockname()[:2]
        address = host_and_port(host, port)
        opened.close()
        settings = self._gateway.settings.picker
        if settings is None or settings.tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(Certificate(settings.tls, "picker.tls")))

    async def _process(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await Call(self._picking, context).serve()

    def drain(self) -> None:
        """Show that no more requests should come."""
        self._is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, and wait for those that there are."""
        if self._server is not None:
            await self._server.stop(grace_s + _CLOSE_S)
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)
        await self._picking.destinations.stop()
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


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return the credentials of a server, which look for other files before each handshake."""
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
