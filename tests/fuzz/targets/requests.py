"""Requests: what `gateway.http.reader` accepts is what a strict parser accepts, however the bytes are cut.

The first byte says how: its lowest bit chooses narrow limits, with the next a connection answers later than the request
arrives, the others are the seed of the cuts. The rest is what a client sends on one connection.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import h11

from gateway.http.connection import ServerConnection
from gateway.http.reader import HEAD, NOTHING, WHOLE, RequestReader
from gateway.http.reply import HttpReply
from gateway.http.request_head import HeadLimits, RequestError, RequestHead
from gateway.http.server import HttpServer, ServerLimits
from tests.fuzz.held import held_bytes
from tests.fuzz.wire import MemoryTransport, cut, run

WIDE = ServerLimits()
NARROW = ServerLimits(head=HeadLimits(target_bytes=64, headers_bytes=256, headers=8), body_bytes=128)
_NARROW_HELD_BYTES = 24_000
"""What a connection may hold besides what one read has brought: objects of a request, and its limits."""
_FRAMING = {b"content-length", b"transfer-encoding", b"upgrade"}
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)([^?#]*)(\?[^#]*)?")


@dataclass(frozen=True)
class Accepted:
    """A request as a parser has read it, without the fields that frame it."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Service:
    """Keeps the requests of a connection up to the first that is refused, and answers them later."""

    def __init__(self) -> None:
        self.accepted: list[Accepted] = []
        self.refused = 0

    def admit(self, reply: HttpReply) -> None:
        pass

    def handle(self, reply: HttpReply, body: bytes) -> None:
        if not self.refused:
            self.accepted.append(_accepted(reply.request, body))
        asyncio.get_running_loop().call_soon(self._answer, reply)

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        assert 400 <= status < 600
        self.refused = status
        reply.whole(status, b"", reason.encode())

    def _answer(self, reply: HttpReply) -> None:
        if not reply.has_ended:
            reply.whole(200, b"", b"ok")


def fuzz_one(data: bytes) -> None:
    """Read what is sent in one piece and cut, and compare."""
    flags, stream = (data[0], data[1:]) if data else (0, b"")
    limits, later, seed = (NARROW if flags & 1 else WIDE), bool(flags & 2), flags >> 2
    pieces = cut(stream, seed)
    cut_up = run(serve(pieces, limits)) if later else read(pieces, limits)
    _compare(cut_up, reference(stream)[: len(cut_up)], "accepted, but not by the reference")
    if limits is WIDE:
        _compare(cut_up, read([stream], limits), "another result, cut")


def _accepted(head: RequestHead, body: bytes) -> Accepted:
    headers = tuple((name, value) for name, value in head.headers if name not in _FRAMING)
    return Accepted(head.method, head.target, headers, body)


def _compare(ours: list[Accepted], theirs: list[Accepted], what: str) -> None:
    assert ours == theirs, f"{what}:\n{ours}\n{theirs}"


def read(pieces: list[bytes], limits: ServerLimits) -> list[Accepted]:
    """Return the requests up to the first that is refused, or after which the connection would be closed."""
    reader, found = RequestReader(limits.head, limits.body_bytes), list[Accepted]()
    try:
        for piece in pieces:
            reader.feed(piece)
            while (event := reader.next()) != NOTHING:
                if event == HEAD:
                    reader.learn()
                elif event == WHOLE:
                    found.append(_accepted(reader.head, reader.body))
                    if not reader.head.keep_alive:
                        return found
            if limits is NARROW:
                _check_held(reader, piece)
    except RequestError as error:
        if not 400 <= error.status < 600:
            raise
    return found


def _check_held(holder: object, piece: bytes, *but: object) -> None:
    held = held_bytes(holder, but=but)
    assert held < _NARROW_HELD_BYTES + 32 * len(piece), f"{held} bytes held after {len(piece)}"


async def serve(pieces: list[bytes], limits: ServerLimits) -> list[Accepted]:
    """Return the same, as a connection hands them on that reads while it answers."""
    service = Service()
    server = HttpServer(service, limits)
    connection = ServerConnection(server)
    transport = MemoryTransport(connection)
    for number, piece in enumerate(pieces, 1):
        transport.deliver([piece])
        if limits is NARROW and (number % 16 == 0 or number == len(pieces)):
            _check_held(connection, piece, server, server.writes, transport, server.connections)
    await transport.settle()
    transport.lose()
    if server._sweep is not None:
        server._sweep.cancel()
    return service.accepted


def reference(stream: bytes) -> list[Accepted]:
    """Return the requests that h11 reads from a stream, until it finds an error or would close."""
    found: list[Accepted] = []
    while stream := stream.lstrip(b"\r\n"):  # empty lines before a request are to be ignored (RFC 9112, section 2.2)
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        parser.receive_data(stream)
        try:
            request = parser.next_event()
            if type(request) is not h11.Request:
                break
            body = b""
            while type(event := parser.next_event()) is h11.Data:
                body += event.data
        except h11.RemoteProtocolError:
            break
        if type(event) is not h11.EndOfMessage:
            break
        target, host = _target(request.target)
        headers = tuple((name, value) for name, value in request.headers if name not in _FRAMING)
        if host:  # the one of the target counts (RFC 9112, section 3.2.2)
            headers = ((b"host", host), *[header for header in headers if header[0] != b"host"])
        found.append(Accepted(request.method.decode("ascii"), target, headers, body))
        if parser.their_state is h11.MUST_CLOSE or request.http_version == b"1.0":
            break
        stream = parser.trailing_data[0]
    return found


def _target(target: bytes) -> tuple[bytes, bytes]:
    """Return the origin form of a target, and the host of an absolute one."""
    if target == b"*":  # the server as a whole
        return b"/", b""
    absolute = _ABSOLUTE.match(target)
    return ((absolute[2] or b"/") + (absolute[3] or b""), absolute[1]) if absolute else (target, b"")
