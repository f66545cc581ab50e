"""The client's side of a connection in memory, frame by frame, and services that answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from hpack import Decoder, Encoder

from gateway.picker.grpc.call import INVALID_ARGUMENT, Call
from gateway.picker.grpc.connection import Connection
from gateway.picker.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEADERS,
    PREFACE,
    RST_STREAM,
    frame,
    settings,
)
from gateway.picker.grpc.server import GrpcServer
from tests.fuzz.wire import MemoryTransport

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
_MOST_TURNS = 64
"""Turns of the event loop that the longest read of a test takes."""
HELLO = PREFACE + settings({})


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def frames_of(data: bytes) -> Iterator[Frame]:
    at = 0
    while at < len(data):
        length_and_kind, flags, stream = HEAD.unpack_from(data, at)
        begin, at = at + 9, at + 9 + (length_and_kind >> 8)
        yield Frame(length_and_kind & 255, flags, stream, data[begin:at])


def message(text: bytes) -> bytes:
    """Return a message as gRPC sends it."""
    return b"\0" + len(text).to_bytes(4, "big") + text


def headers(stream: int, fields: list[tuple[str, str]] = REQUEST, flags: int = END_HEADERS) -> bytes:
    """Return the frame of a request, whose block needs no tables."""
    encoder = Encoder()
    encoder.header_table_size = 0
    block = encoder.encode(fields).removeprefix(b"\x20")  # without the change of the table's size
    return frame(HEADERS, flags, stream, block)


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return frame(DATA, flags, stream, payload)


def call(stream: int, *texts: bytes) -> bytes:
    """Return a complete call."""
    return headers(stream) + data(stream, b"".join(map(message, texts)), END_STREAM)


class Echo:
    """Answers each message with itself; `fail`, `break` and `end` do as they say, `later` waits until `go_on`."""

    def __init__(self, server: Services, call: Call) -> None:
        self._call = call
        self._server = server
        self.received: list[bytes] = []
        self.is_closed = False
        server.calls.append(self)

    def handle(self, message: bytes | bytearray) -> None:
        text = bytes(message)
        self.received.append(text)
        if text == b"fail":
            self._call.fail(INVALID_ARGUMENT, "50% of Zürich")
        elif text == b"break":
            raise RuntimeError("broken")
        elif text == b"end":
            self._call.end()
        elif text != b"later":
            self._call.send(text * self._server.factor)

    def go_on(self) -> None:
        for text in self.received:
            self._call.send(text)
        self._call.end()

    def half_close(self) -> None:
        if b"later" not in self.received:
            self._call.end()

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Services(GrpcServer):
    """A server of `/test/Echo`, which repeats what it answers so many times."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__({"/test/Echo": self._begin_echo})
        self.factor = factor
        self.calls: list[Echo] = []

    def _begin_echo(self, call: Call) -> Echo:
        return Echo(self, call)


class Peer:
    """A client in memory."""

    def __init__(self, services: Services | None = None, hello: bytes = HELLO) -> None:
        self.services = services or Services()
        self.connection: Connection = self.services.connect()
        self.transport = MemoryTransport(self.connection)
        self._read = 0
        self.send(hello)

    @property
    def calls(self) -> list[Echo]:
        return self.services.calls

    def send(self, *pieces: bytes) -> None:
        self.transport.deliver(list(pieces))

    async def frames(self) -> list[Frame]:
        """Return the frames that have been written since the last time."""
        for _ in range(_MOST_TURNS):
            await asyncio.sleep(0)
        await self.transport.settle()
        written = bytes(self.transport.written)
        begin, self._read = self._read, len(written)
        return list(frames_of(written[begin:]))

    async def exchange(self, *pieces: bytes) -> list[Frame]:
        """Send, and return what comes."""
        await self.frames()
        self.send(*pieces)
        return await self.frames()

    async def goaway(self, *pieces: bytes) -> int | None:
        """Send, and return the error code with which the connection ends; None if it goes on."""
        last = next((each for each in await self.exchange(*pieces) if each.kind == GOAWAY), None)
        await asyncio.sleep(0)
        assert self.transport.is_lost == (last is not None)
        return None if last is None else int.from_bytes(last.payload[4:8], "big")

    async def reset(self, *pieces: bytes) -> int | None:
        """Send, and return the error code with which a stream ends; None if none does."""
        found = next((each for each in await self.exchange(*pieces) if each.kind == RST_STREAM), None)
        return None if found is None else int.from_bytes(found.payload, "big")


def body_of(found: list[Frame]) -> bytes:
    return b"".join(each.payload for each in found if each.kind == DATA)


def trailers_of(found: list[Frame]) -> dict[str, str]:
    """Return the fields of the last header block."""
    block = [each.payload for each in found if each.kind == HEADERS][-1]
    return dict(Decoder().decode(block))
