"""The service as a whole, over gRPC, and the certificate of its address."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from backends.validation import UsageError
from gateway.config.settings import TlsSettings
from gateway.listening.certificate import Certificate
from gateway.rooms.picker.ext_proc_pb2 import HttpBody, ProcessingMode, ProcessingRequest, ProcessingResponse
from gateway.rooms.picker.server import SERVICE, PickerServer
from tests.gateway.rooms.picker.played_proxy import BODY, CHAT, IDLE, JSON, PlayedProxy, http_headers, response_headers
from tests.support.certificates import copied, make_pair, replace
from tests.support.command import gateway_command
from tests.support.pool_file import NOWHERE, write_pool
from tests.support.waiting import TIMEOUT_S, eventually, eventually_async

PROCESS = f"/{SERVICE}/Process"
PIECE = ProcessingRequest(request_body=HttpBody(body=b"{"))
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
async def test_an_upload_that_does_not_end_is_refused_and_the_call_ended() -> None:
    async with serving({"server": {"body_s": 0.2}}) as (proxy, _, channel):
        call = await begun(channel, PIECE)
        assert (await read(call)).immediate_response.status.code == 408
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert proxy.in_flight() == IDLE


@pytest.mark.parametrize(
    "messages",
    [[], [PIECE], COMPLETE, [*COMPLETE, response_headers(200, JSON, "")]],
    ids=["head", "piece", "body", "answer"],
)
async def test_a_call_that_the_proxy_ends_early_ends_well(messages: list[ProcessingRequest]) -> None:
    async with serving({}) as (proxy, _, channel):
        call = await begun(channel, *messages)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK
        assert proxy.in_flight() == IDLE


async def test_a_piece_may_be_larger_than_the_buffer_of_the_proxy() -> None:
    async with serving({}) as (_, _, channel):
        piece = ProcessingRequest(request_body=HttpBody(body=b" " * (5 << 20)))  # with a buffer of 4 MiB
        call = await begun(channel, piece, *COMPLETE)
        assert (await read(call)).WhichOneof("response") == "request_headers"
        call.cancel()


async def test_messages_that_are_only_shown_are_not_answered() -> None:
    async with serving({}) as (_, _, channel):
        call: Any = channel.stream_stream(PROCESS)()
        await call.write(ProcessingRequest(observability_mode=True, response_headers={}).SerializeToString())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_health_is_told_of_each_service_that_there_is() -> None:
    async with serving({}) as (_, _, channel):
        check = cast("Any", HealthStub(channel)).Check
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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[TlsSettings]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_pair(folder / str(number)) for number in range(2)]


@pytest.fixture
def used(pairs: list[TlsSettings], tmp_path: Path) -> TlsSettings:
    """A copy of the first pair, whose files may be replaced."""
    return copied(pairs[0], tmp_path)


def test_files_that_cannot_be_used_are_named(pairs: list[TlsSettings], tmp_path: Path) -> None:
    mixed = TlsSettings(certificate=pairs[0].certificate, key=pairs[1].key)
    missing = TlsSettings(certificate=tmp_path / "none.crt", key=pairs[0].key)
    fifo = TlsSettings(certificate=pairs[0].certificate, key=tmp_path / "fifo")
    os.mkfifo(fifo.key)
    for settings, why in ((mixed, ""), (missing, "No such file"), (fifo, "not a regular file but a FIFO")):
        named = f"{settings.certificate} and {settings.key} cannot be used"
        with pytest.raises(UsageError, match=rf"{named} \(.*{why}"):
            Certificate(settings, "picker.tls")


async def test_a_renewed_certificate_is_shown_without_a_restart(pairs: list[TlsSettings], used: TlsSettings) -> None:
    async with listening({"picker": {"tls": used.model_dump()}}) as (_, _, address):

        async def serves(trusted: TlsSettings) -> bool:
            credentials = grpc.ssl_channel_credentials(trusted.certificate.read_bytes())
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(address, credentials, options) as channel:
                try:
                    answer = await cast("Any", HealthStub(channel)).Check(
                        HealthCheckRequest(service="liveness"), timeout=10
                    )
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    return False
                return bool(answer.status == HealthCheckResponse.SERVING)

        assert await serves(pairs[0])
        assert not await serves(pairs[1])
        replace(used.certificate, pairs[1].certificate)
        replace(used.key, pairs[1].key)
        await eventually_async(lambda: serves(pairs[1]))
        assert not await serves(pairs[0])
