"""The service as a whole, over gRPC."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from gateway.dialects.errors import GatewayError
from gateway.relay.context import STOPPING
from gateway.rooms.picker.ext_proc_pb2 import HttpBody, ProcessingMode, ProcessingRequest, ProcessingResponse
from gateway.rooms.picker.server import SERVICE, PickerServer
from tests.gateway.rooms.picker.played_proxy import BODY, CHAT, IDLE, JSON, PlayedProxy, http_headers, response_headers
from tests.support.command import gateway_command
from tests.support.pool_file import NOWHERE, write_pool
from tests.support.waiting import TIMEOUT_S, eventually, stays

PROCESS = f"/{SERVICE}/Process"
COMPLETE = [ProcessingRequest(request_body=HttpBody(body=BODY, end_of_stream=True))]


@asynccontextmanager
async def listening(pool: Mapping[str, Any]) -> AsyncIterator[tuple[PlayedProxy, PickerServer, str]]:
    """Serve a pool; yield the proxy that is played, the picker, and its address."""
    proxy = PlayedProxy(pool)
    picker = PickerServer(proxy.gateway, None)  # type: ignore[arg-type] # nothing here is for the gateway itself
    opened = socket.create_server(("127.0.0.1", 0))
    port = opened.getsockname()[1]
    await picker.start(opened)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield proxy, picker, f"127.0.0.1:{port}"
    finally:
        await picker.stop(0.0)


@asynccontextmanager
async def serving(pool: Mapping[str, Any]) -> AsyncIterator[tuple[PlayedProxy, PickerServer, grpc.aio.Channel]]:
    """Serve a pool; yield the proxy that is played, the picker, and a channel to it."""
    async with listening(pool) as (proxy, picker, address), grpc.aio.insecure_channel(address) as channel:
        yield proxy, picker, channel


async def begun(channel: grpc.aio.Channel, *messages: ProcessingRequest) -> Any:
    """Return a call that has begun with the headers of a request and some more messages."""
    call: Any = channel.stream_stream(PROCESS)()
    headers = ProcessingRequest(request_headers=http_headers([(":method", "POST"), (":path", CHAT)]))
    headers.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    for message in (headers, *messages):
        await call.write(message.SerializeToString())
    return call


async def read(call: Any) -> ProcessingResponse:
    return ProcessingResponse.FromString(await call.read())


@pytest.mark.slow
async def test_an_upload_that_does_not_end_is_refused() -> None:
    async with serving({"server": {"body_s": 0.2}}) as (_, _, channel):
        call = await begun(channel, ProcessingRequest(request_body=HttpBody(body=b"{")))
        assert (await read(call)).immediate_response.status.code == 408
        assert await call.read() is grpc.aio.EOF


async def test_what_is_known_later_is_sent_and_ends_the_call() -> None:
    async with serving({}) as (proxy, _, channel):
        call = await begun(channel, *COMPLETE)
        assert (await read(call)).HasField("request_headers")
        assert (await read(call)).HasField("request_body")
        (exchange,) = proxy.gateway.relay.exchanges
        exchange.end_with_error(GatewayError(504, "Too late.", code="late"))
        assert (await read(call)).immediate_response.status.code == 504
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("stage", range(4))
async def test_a_call_that_the_proxy_ends_early_ends_well(stage: int) -> None:
    piece = ProcessingRequest(request_body=HttpBody(body=b"{"))
    messages = [[], [piece], COMPLETE, [*COMPLETE, response_headers(200, JSON, "")]][stage]
    async with serving({}) as (proxy, _, channel):
        call = await begun(channel, *messages)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK
        assert proxy.in_flight() == IDLE


async def test_messages_that_are_only_shown_are_not_answered() -> None:
    shown = ProcessingRequest(observability_mode=True, response_headers={})
    async with serving({}) as (_, _, channel):
        call: Any = channel.stream_stream(PROCESS)()
        await call.write(shown.SerializeToString())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_health_is_told_of_each_service_that_there_is() -> None:
    async with serving({}) as (_, _, channel):
        check = HealthStub(channel).Check
        for service in ("liveness", "readiness", SERVICE, ""):
            assert (await check(HealthCheckRequest(service=service))).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await check(HealthCheckRequest(service="no.such.Service"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_message_that_is_none_is_refused() -> None:
    async with serving({}) as (proxy, _, channel):
        for wrong in (b"\xff", ProcessingRequest().SerializeToString(), COMPLETE[0].SerializeToString()):
            call: Any = channel.stream_stream(PROCESS)()
            await call.write(wrong)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert proxy.in_flight() == IDLE


@pytest.mark.slow
async def test_requests_whose_calls_are_reset_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving({}) as (proxy, _, channel):
        for _ in range(20):
            calls = [await begun(channel, *COMPLETE) for _ in range(20)]
            await read(calls[0])
            for call in calls:
                call.cancel()
        await eventually(lambda: proxy.in_flight() == IDLE)
        assert (await read(await begun(channel, *COMPLETE))).HasField("request_headers")
    assert not caplog.messages


@pytest.mark.slow
def test_clients_beside_the_proxy_are_told_at_once_that_the_gateway_ends(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool.yaml", {"a": NOWHERE}, server={"drain_s": TIMEOUT_S})
    with gateway_command(pool, tmp_path, "--listen", "127.0.0.1:0", subcommand="picker") as gateway:
        address = "127.0.0.1", int(gateway.url.rpartition(":")[2])
        messages: SimpleQueue[ProcessingRequest] = SimpleQueue()
        with grpc.insecure_channel(gateway.picker) as channel, socket.create_connection(address, TIMEOUT_S) as client:
            call: Any = channel.stream_stream(PROCESS, ProcessingRequest.SerializeToString)(iter(messages.get, None))
            messages.put(ProcessingRequest(request_headers=http_headers([(":method", "POST"), (":path", CHAT)])))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
            gateway.process.terminate()
            client.settimeout(TIMEOUT_S / 2)
            assert client.recv(4096) == b"", "closed, while a call of the proxy goes on"
            assert call.is_active()
            call.cancel()
        assert gateway.process.wait(TIMEOUT_S) == 0


async def test_calls_end_well_when_the_picker_stops() -> None:
    async with serving({}) as (proxy, picker, channel):
        call = await begun(channel, *COMPLETE, response_headers(200, JSON, ""))
        for _ in range(3):
            await read(call)
        stopped = asyncio.create_task(picker.stop(TIMEOUT_S))
        await stays(lambda: not stopped.done(), for_s=0.05)
        for exchange in list(proxy.gateway.relay.exchanges):
            exchange.end_with_error(GatewayError(503, "The gateway is being stopped.", code=STOPPING))
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await stopped
