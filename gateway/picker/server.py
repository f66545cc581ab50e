"""The gRPC server of the endpoint picker: Envoy's external processing, and health."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import grpc
import httpx
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from gateway.frontend.http import App
from gateway.picker.destinations import Destinations
from gateway.picker.messages import request_of
from gateway.picker.stream import Picking, ProtocolError, Stream

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]

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

    async def start(self, listen: str) -> None:
        """Accept streams at an address.

        Raises
        ------
        RuntimeError
            If the address cannot be listened on.
        """
        self._server.add_insecure_port(listen)
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
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.observability_mode:
            await self._observe(first, context)
            return
        stream = Stream(self._picking, context.write)
        try:
            message = first
            while message is not grpc.aio.EOF:
                await stream.handle(message)
                if stream.has_ended:
                    break
                message = await context.read()
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not stream.has_ended:
                raise
        finally:
            stream.close()

    async def _observe(self, first: ProcessingRequest, context: Context) -> None:
        """Serve a stream that only shows an answer; the proxy stops showing it when the stream ends."""
        stream = self._picking.streams.get(request_of(first.metadata_context))
        if stream is None or stream.exchange is None or not first.HasField("response_headers"):
            return
        if not stream.needs_answer():
            return
        exchange, message = stream.exchange, first
        stream.is_observed = True
        try:
            stream.on_answer_begun(first, is_read=True)
            while not first.response_headers.end_of_stream:
                message = await context.read()
                if message is grpc.aio.EOF or message.HasField("response_trailers"):
                    break
                exchange.on_data(message.response_body.body)
                if message.response_body.end_of_stream:
                    break
            if message is not grpc.aio.EOF:
                exchange.on_end()
        finally:
            exchange.on_close()

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
