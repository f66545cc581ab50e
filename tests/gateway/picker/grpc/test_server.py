"""Calls of real clients of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from gateway.picker.grpc.call import MESSAGE_BYTES
from tests.gateway.picker.grpc.peer import Services
from tests.support.waiting import eventually

PATH = "/test/Echo"
WIDE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Services, str]]:
    services = Services()
    opened = socket.create_server(("127.0.0.1", 0))
    await services.start(opened)
    try:
        yield services, f"127.0.0.1:{opened.getsockname()[1]}"
    finally:
        await services.stop(0.0)
    assert services.connections == set()


@contextlib.asynccontextmanager
async def client(**kwargs: object) -> AsyncIterator[tuple[Services, grpc.aio.StreamStreamMultiCallable[bytes, bytes]]]:
    async with served() as (services, address):
        async with grpc.aio.insecure_channel(address, options=WIDE, **kwargs) as channel:
            yield services, channel.stream_stream(PATH)


async def several(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def test_messages_of_all_sizes_in_both_directions() -> None:
    sizes = [0, 1, 16_378, 16_379, 16_380, 65_535, 220_000, 3 << 20]
    messages = [bytes([at]) * size for at, size in enumerate(sizes)]
    async with client() as (services, echo):
        assert [answer async for answer in echo(several(*messages))] == messages
        await eventually(lambda: services.calls[0].is_closed)


async def test_many_calls_at_once() -> None:
    async with client() as (services, echo):

        async def one(number: int) -> bool:
            messages = [b"%d %d" % (number, at) for at in range(5)]
            return [answer async for answer in echo(several(*messages))] == messages

        assert all(await asyncio.gather(*(one(number) for number in range(200))))
        assert len(services.connections) == 1


async def test_a_blocking_client() -> None:
    async with served() as (_, address):

        def ask() -> list[bytes]:
            with grpc.insecure_channel(address) as channel:
                return list(channel.stream_stream(PATH)(iter([b"one", b"two"])))

        assert await asyncio.to_thread(ask) == [b"one", b"two"]


async def test_a_client_that_waits_for_each_answer() -> None:
    async with client() as (services, echo):
        call = echo()
        for text in (b"one", b"two"):
            await call.write(text)
            assert await call.read() == text
        call.cancel()
        await eventually(lambda: services.calls[0].is_closed)


@pytest.mark.parametrize(
    ("code", "details", "messages"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "50% of Zürich", [b"fail"]),
        (grpc.StatusCode.INVALID_ARGUMENT, "50% of Zürich", [b"one", b"fail"]),
        (grpc.StatusCode.INTERNAL, "The message could not be handled.", [b"break"]),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"A message has {MESSAGE_BYTES + 1} bytes; at most {MESSAGE_BYTES} are accepted.",
            [bytes(MESSAGE_BYTES + 1)],
        ),
    ],
)
async def test_a_call_that_fails(code: grpc.StatusCode, details: str, messages: list[bytes]) -> None:
    async with client() as (services, echo):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in echo(several(*messages)):
                pass
        assert (raised.value.code(), raised.value.details()) == (code, details)
        await eventually(lambda: services.calls[0].is_closed)
        assert [answer async for answer in echo(several(b"next"))] == [b"next"]


async def test_a_server_that_ends_first() -> None:
    async with client() as (services, echo):
        call = echo()
        await call.write(b"end")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await eventually(lambda: services.calls[0].is_closed)


async def test_compressed_messages_are_refused() -> None:
    async with client(compression=grpc.Compression.Gzip) as (_, echo):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in echo(several(bytes(10_000))):
                pass
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_another_path() -> None:
    async with served() as (_, address):
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/test/Nothing")(b"")
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert raised.value.details() == "There is nothing at /test/Nothing."


async def test_stopping_waits_for_calls_and_then_ends_them() -> None:
    async with client() as (services, echo):
        first = echo()
        await first.write(b"later")
        await eventually(lambda: services.calls and services.calls[0].received)
        second = echo()
        await second.write(b"later")
        await eventually(lambda: len(services.calls) == 2 and services.calls[1].received)
        stopping = asyncio.create_task(services.stop(1.0))
        services.calls[0].go_on()
        assert await first.read() == b"later"
        assert await first.code() is grpc.StatusCode.OK
        assert await second.code() is grpc.StatusCode.UNAVAILABLE
        await stopping
        assert all(each.is_closed for each in services.calls)
