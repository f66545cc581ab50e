"""The gRPC server of the endpoint picker: Envoy's external processing, and health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

import grpc
import httpx
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from gateway.frontend.http import App
from gateway.picker.destinations import Destinations
from gateway.picker.observation import Observation
from gateway.picker.stream import Picking, ProtocolError, Stream

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]

    from gateway.config.settings import PickerSettings
    from gateway.service.assembly import Gateway

log = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVE: Final = "liveness"
_READY: Final = ("readiness", SERVICE, "")
_CHECK_S: Final = 0.5
_MESSAGE_BYTES: Final = 16 << 20
"""Longest message of a proxy, which sends bodies in pieces."""


class PickerServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and `grpc.health.v1.Health` for a gateway process.

    Parameters
    ----------
    own
        ASGI application for the gateway's own paths.
    """

    def __init__(self, gateway: Gateway, own: App) -> None:
        self._gateway = gateway
        client = httpx.AsyncClient(transport=httpx.ASGITransport(own), base_url="http://gateway")
        self._picking = Picking(gateway, Destinations(), client)
        self._health = health.HealthServicer()
        self._is_draining = False
        self._checks: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", _MESSAGE_BYTES)]
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Process": process})])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, settings: PickerSettings) -> None:
        """Accept streams at the address of the settings.

        Raises
        ------
        RuntimeError
            If the address cannot be listened on.
        """
        if (tls := settings.tls) is None:
            self._server.add_insecure_port(settings.listen)
        else:
            pair = tls.key.read_bytes(), tls.certificate.read_bytes()
            self._server.add_secure_port(settings.listen, grpc.ssl_server_credentials([pair]))
        await self._picking.destinations.start(self._gateway.pool)
        await self._health.set(_LIVE, HealthCheckResponse.SERVING)
        await self._check()
        self._checks = asyncio.create_task(self._check_regularly())
        await self._server.start()

    def drain(self) -> None:
        """Show that no more requests should come."""
        self._is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Stop accepting streams, and wait for those that there are."""
        await self._server.stop(grace_s)
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)
        await self._picking.destinations.stop()
        await self._picking.own.aclose()

    async def _process(self, _: object, context: Context) -> None:
        """Serve one stream; its messages are read one by one, so that none waits in memory."""
        wire = _Wire(context)
        stream: Stream | Observation | None = None
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if stream is None:
                    is_shown = message.observability_mode
                    stream = Observation(self._picking) if is_shown else Stream(self._picking, wire)
                stream.handle(message)
                await wire.flush()
                if stream.has_ended:
                    break
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not wire.is_ending:
                raise
        finally:
            if stream is not None:
                stream.close()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._check()

    async def _check(self) -> None:
        """Publish whether any replica can serve."""
        is_ready = not self._is_draining and any(self._gateway.pool.up(name) for name in self._gateway.models)
        status = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
        for service in _READY:
            await self._health.set(service, status)


class _Wire:
    """Sends messages in order: those of one turn of `_process` at its end, others by a task of their own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._serving = asyncio.current_task()
        self._unsent: deque[ProcessingResponse] = deque()
        self._sending: asyncio.Task[None] | None = None
        self.is_ending = False

    def send(self, message: ProcessingResponse) -> None:
        """Queue a message."""
        self._unsent.append(message)
        if asyncio.current_task() is not self._serving:
            self._send_later()

    def end(self) -> None:
        """End the stream once all messages have been sent."""
        self.is_ending = True
        if asyncio.current_task() is not self._serving:
            self._send_later()

    async def flush(self) -> None:
        """Send what is queued."""
        while self._unsent:
            await self._context.write(self._unsent.popleft())

    def _send_later(self) -> None:
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        with contextlib.suppress(Exception):  # the proxy has gone, which ends the stream
            await self.flush()
        self._sending = None
        if self.is_ending and self._serving is not None:
            self._serving.cancel()
