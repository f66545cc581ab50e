"""Answers of engines: each call has exactly one outcome, and the bytes of its body do not depend on the cuts.

The first byte is the seed of the cuts, with two bits for a HEAD request and for whole answers. The rest is what an
engine sends on one connection before it closes it; each call begins when the one before has ended.
"""

from __future__ import annotations

import h11

from backends.http.address import Address
from backends.http.client import Call, UpstreamClient, UpstreamConnection
from backends.http.receiver import AnswerHead, HeaderList, UpstreamError, WholeReceiver
from tests.fuzz.wire import MemoryTransport, cut, run

_CALLS = 3
_NOWHERE = Address.parse("unix:/nonexistent/engine.sock")
_KINDS = {"connect", "broken", "garbage", "exhausted"}

Outcome = tuple[str, int, bytes]
"""How a call ended (`end`, or the kind of its error), its status and the bytes of its body."""


class Receiver(WholeReceiver):
    """Notes one answer, and that its callbacks come in order."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended = ""

    def on_head(self, status: int, headers: HeaderList) -> None:
        assert not self.status
        assert not self.ended
        assert status >= 200
        self.status = status

    def on_data(self, data: bytes) -> None:
        assert self.status
        assert not self.ended
        assert data
        self.body += data

    def on_end(self) -> None:
        assert self.status
        assert not self.ended
        self.ended = "end"

    def on_error(self, error: UpstreamError) -> None:
        assert not self.ended
        assert error.kind in _KINDS
        self.ended = error.kind

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        assert not self.status
        self.status, self.body, self.ended = head.status, body, "end"

    @property
    def outcome(self) -> Outcome:
        return self.ended, self.status, self.body


def fuzz_one(data: bytes) -> None:
    """Answer calls in one piece and cut, and compare with each other and with h11."""
    flags, stream = (data[0], data[1:]) if data else (0, b"")
    head_only, takes_whole, seed = bool(flags & 1), bool(flags & 2), flags >> 2
    pieces = run(calls(cut(stream, seed), head_only=head_only, takes_whole=takes_whole, calls=_CALLS))
    whole = run(calls([stream], head_only=head_only, takes_whole=False, calls=1))
    assert pieces[0] == whole[0], f"another answer, cut:\n{pieces}\n{whole}"
    if pieces[0][0] == "end" and (expected := reference(stream, head_only=head_only)) is not None:
        assert pieces[0][1:] == expected, f"accepted, but not as by the reference:\n{pieces}\n{expected}"


async def calls(pieces: list[bytes], *, head_only: bool, takes_whole: bool, calls: int) -> list[Outcome]:
    client = UpstreamClient(_NOWHERE)
    connection = UpstreamConnection(client)
    transport = MemoryTransport(connection)
    client.keep(connection)
    left = list(pieces)
    outcomes = []
    for _ in range(calls):
        receiver = Receiver()
        call = client.send(
            Call(b"GET / HTTP/1.1\r\n\r\n", b"", receiver, head_only=head_only, whole=receiver if takes_whole else None)
        )
        while left and not receiver.ended and not transport.is_closing():
            transport.deliver([left.pop(0)])
        if not receiver.ended:
            transport.lose()
        if call.connecting is not None:  # lost before the first byte: sent again, on a new connection
            await call.connecting
        assert receiver.ended, "no outcome"
        outcomes.append(receiver.outcome)
        if transport.is_closing():
            break
    client.close()
    transport.lose()
    return outcomes


def reference(stream: bytes, *, head_only: bool) -> tuple[int, bytes] | None:
    """Return status and body of the first answer, as h11 reads it; None if it refuses it."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method="HEAD" if head_only else "GET", target="/", headers=[("host", "a")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(stream)
    parser.receive_data(b"")
    try:
        while type(event := parser.next_event()) is h11.InformationalResponse:
            pass
        if type(event) is not h11.Response:
            return None
        status, body = event.status_code, b""
        while type(data := parser.next_event()) is h11.Data:
            body += data.data
        return (status, body) if type(data) is h11.EndOfMessage else None
    except h11.RemoteProtocolError:
        return None
