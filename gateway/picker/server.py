"""The gRPC services of the endpoint picker: Envoy's external processing, and health."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Final

import httpx
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from backends import background
from gateway.picker.destinations import Destinations
from gateway.picker.ext_proc_pb2 import ProcessingRequest
from gateway.picker.grpc.call import INVALID_ARGUMENT, Call
from gateway.picker.grpc.server import GrpcServer
from gateway.picker.health import Health
from gateway.picker.observation import Observation
from gateway.picker.stream import Picking, ProtocolError, Stream
from gateway.picker.tls import Certificate

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

log = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVE: Final = "liveness"
_READY: Final = ("readiness", SERVICE, "")
_CHECK_S: Final = 0.5


class PickerServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and `grpc.health.v1.Health` for a gateway process."""

    def __init__(self, gateway: Gateway, own: ASGIApp) -> None:
        self._gateway = gateway
        client = httpx.AsyncClient(transport=httpx.ASGITransport(own), base_url="http://gateway")
        self._picking = Picking(gateway, Destinations(), client)
        self._health = Health()
        self._is_draining = False
        self._checks: asyncio.Task[None] | None = None
        self._certificate: Certificate | None = None
        self._server = GrpcServer(
            {
                f"/{SERVICE}/Process": lambda call: _Process(self._picking, call),
                "/grpc.health.v1.Health/Check": self._health.check,
                "/grpc.health.v1.Health/Watch": self._health.watch,
            }
        )

    async def start(self, opened: socket.socket) -> None:
        """Accept calls at a bound socket, with TLS if the settings say so."""
        settings = self._gateway.settings.picker
        if settings is not None and settings.tls is not None:
            self._certificate = Certificate(settings.tls)
        await self._picking.destinations.start(self._gateway.pool)
        self._health.set(_LIVE, serves=True)
        self._check()
        self._checks = background.keep_running("picker", self._check_regularly, of="its health")
        await self._server.start(opened, None if self._certificate is None else self._certificate.context)

    def drain(self) -> None:
        """Show that no more requests should come."""
        self._is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, and wait for those that there are."""
        await self._server.stop(grace_s)
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)
        await self._picking.destinations.stop()
        await self._picking.own.aclose()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self._check()
            self._picking.unfinished.check(time.monotonic())
            if self._certificate is not None:
                self._certificate.refresh()

    def _check(self) -> None:
        """Publish whether any replica can serve."""
        is_ready = not self._is_draining and any(self._gateway.pool.up(name) for name in self._gateway.models)
        for service in _READY:
            self._health.set(service, serves=is_ready)


class _Process:
    """A call of `Process`: a request, or an answer that is only shown."""

    def __init__(self, picking: Picking, call: Call) -> None:
        self._picking = picking
        self._call = call
        self._stream: Stream | Observation | None = None

    def handle(self, data: bytes | bytearray) -> None:
        """Handle a message of the proxy."""
        try:
            message = ProcessingRequest.FromString(data)  # type: ignore[arg-type] # a bytearray will do
            stream = self._stream
            if stream is None:
                is_shown = message.observability_mode
                stream = Observation(self._picking) if is_shown else Stream(self._picking, self)
                self._stream = stream
            stream.handle(message)
        except (ProtocolError, DecodeError) as error:
            self._call.fail(INVALID_ARGUMENT, str(error))
            return
        if stream.has_ended:
            self._call.end()

    def send(self, message: bytes) -> None:
        """Send a message, after those before."""
        self._call.send(message)

    def end(self) -> None:
        """End the stream well, once all messages have been sent."""
        self._call.end()

    def half_close(self) -> None:
        """Handle that the proxy has nothing more to say."""
        self._call.end()

    def close(self) -> None:
        """Handle the end of the call."""
        if self._stream is not None:
            self._stream.close()
