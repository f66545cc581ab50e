"""Replicas that misbehave on demand: `python -m benchmarks.attacks.upstream PORT`.

They answer as those of `benchmarks.overhead.upstream`, but for requests whose body has one of the words below. `GET
/stats` counts requests whose message is `SMUGGLED`, which a proxy has found inside another one, and those for a stored
response, which none of them has.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from benchmarks.overhead import upstream

GARBAGE, ENDLESS, LONG, SMUGGLED = b"ATTACK-GARBAGE", b"ATTACK-ENDLESS", b"ATTACK-LONG", "SMUGGLED"
LONG_BYTES = 100 << 20
_BAD_REPLICA = "127.0.0.1"
"""Sends garbage; the others answer."""
_EVENT = b"data: " + b"x" * 16_376 + b"\n\n"
_TEXT = b'{"padding": "' + b"x" * 65_523
_PIECE_INTERVAL_S = 0.005
_SHORT_BYTES = 4096


class Upstream(upstream.Upstream):
    """One connection."""

    smuggled = asked = 0

    def __init__(self) -> None:
        super().__init__()
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def on_body(self, body: bytes) -> None:
        if len(self._body) < _SHORT_BYTES:  # keeping, and parsing, a large one would make others wait
            super().on_body(body[:_SHORT_BYTES])

    def on_message_complete(self) -> None:
        if self._url == b"/stats":
            self._transport.write(upstream.document({"smuggled": Upstream.smuggled, "asked": Upstream.asked}))
        elif self._url.startswith(b"/v1/responses/"):
            Upstream.asked += 1
            self._transport.write(upstream.answer(b"{}", status=b"404 Not Found"))
        elif GARBAGE in self._body and self._transport.get_extra_info("sockname")[0] == _BAD_REPLICA:
            self._transport.write(b"\x16\x03\x01\x00 this is no HTTP\r\n\r\n" * 100)
            self._transport.close()
        elif ENDLESS in self._body:
            self._send(b"application/json", _TEXT, None)
        elif LONG in self._body:
            self._send(b"text/event-stream", _EVENT, LONG_BYTES)
        else:
            Upstream.smuggled += _message(self._body) == SMUGGLED
            super().on_message_complete()

    def _send(self, kind: bytes, piece: bytes, size: int | None) -> None:
        task = asyncio.get_running_loop().create_task(self._stream(kind, piece, size))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, kind: bytes, piece: bytes, size: int | None) -> None:
        """Send an answer of this size; without one, until the connection is lost."""
        transport = self._transport
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind)
        chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
        sent = 0
        while not transport.is_closing() and (size is None or sent < size):
            await self._writable.wait()
            transport.write(chunk)
            sent += len(piece)
            await asyncio.sleep(_PIECE_INTERVAL_S if size is None else 0)
        transport.write(b"0\r\n\r\n")


def _message(body: bytes) -> object:
    try:
        return json.loads(body)["messages"][0]["content"]
    except (ValueError, LookupError, TypeError):
        return None


if __name__ == "__main__":
    uvloop.run(upstream.serve(int(sys.argv[1]), Upstream))
