"""Calls of gRPC: a connection answers the same however its bytes are cut, and no exception escapes.

The first byte is the seed of the cuts. The rest is what a client sends on one connection after its settings.
"""

from __future__ import annotations

from tests.fuzz.wire import cut, run
from tests.gateway.picker.grpc.peer import HELLO, Peer

_WRITTEN_PER_BYTE = 4
"""What may be written for each byte that is read, besides the greeting and what ends the connection."""
_BESIDES = 512

Outcome = tuple[bytes, list[tuple[list[bytes], bool]], bool]


def fuzz_one(data: bytes) -> None:
    """Send it whole and cut, and compare."""
    stream = HELLO + data[1:]
    whole = run(serve([stream]))
    assert len(whole[0]) <= _BESIDES + _WRITTEN_PER_BYTE * len(stream), "an answer that is much longer"
    pieces = run(serve(cut(stream, data[0] if data else 0)))
    assert pieces == whole, f"another answer, cut:\n{pieces}\n{whole}"


async def serve(pieces: list[bytes]) -> Outcome:
    """Return what is written, what the calls have received, and whether the connection has ended."""
    peer = Peer(hello=b"")
    peer.send(*pieces)
    await peer.transport.settle()
    has_ended = peer.transport.is_lost
    written = bytes(peer.transport.written)
    peer.transport.lose()
    assert all(each.is_closed for each in peer.calls)
    assert not peer.services.connections
    return written, [(each.received, each.is_closed) for each in peer.calls], has_ended
