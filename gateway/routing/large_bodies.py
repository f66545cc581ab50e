"""Large bodies: checks in steps what one costs to parse, so that nobody waits for the parsing of more than one.

A parser takes up to 100 ns and 90 bytes for a value of three bytes, so a body of small values may cost over a hundred
times its size. Counting the values costs about as much as copying the body.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from backends import background
from gateway.dialects.errors import GatewayError

_PIECE_BYTES: Final = 2**18
_QUOTES: Final = 1  # a string has two
_ELEMENTS: Final = 1  # a comma precedes each but the first
_MEMBERS: Final = 2
_CONTAINERS: Final = 16


def check_cost(body: bytes, most: int) -> Iterator[None]:
    r"""Count the values of a body, piece by piece, so that other work can run in between.

    An element counts 1 for its comma, a string 2, a member of an object 2 for its colon, an array or object 16: roughly
    in proportion to the time to parse and to read them. The content of strings counts nothing.

    Examples
    --------
    >>> list(check_cost(b'{"prompt": [1, 2, 3], "a": "x, [\\"y\\"], z"}', most=45))
    [None]
    >>> list(check_cost(b'{"prompt": [1, 2, 3], "a": "x, [\\"y\\"], z"}', most=44))
    Traceback (most recent call last):
    gateway.dialects.errors.GatewayError: The body has too many JSON values. ...
    """
    count, rest, is_inside = 0, b"", False
    for at in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[at : at + _PIECE_BYTES]
        rest = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it escapes a byte of the next piece
                piece, rest = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = piece.count(b'"')
        count += quotes * _QUOTES
        outside = b"" if is_inside else piece
        if quotes and count <= most:
            outside = b"".join(piece.split(b'"')[is_inside::2])
        is_inside ^= quotes % 2 == 1
        count += _ELEMENTS * outside.count(b",") + _MEMBERS * outside.count(b":")
        count += _CONTAINERS * (outside.count(b"{") + outside.count(b"["))
        if count > most:
            raise GatewayError(
                413,
                "The body has too many JSON values. Send fewer in one request; "
                "server.max_body_values in the gateway's pool file is the limit.",
                code="too_many_values",
            )
        yield


_SHORT_S: Final = 0.005
"""After a shorter step, the next one runs in the next iteration of the event loop."""


class Turns:
    """Runs one step of one request at a time, from each client in turn.

    After a long step, everything else gets as much time: a client that keeps the gateway busy with large bodies takes
    at most half of it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Iterator[None]]] = {}
        self._free_s = 0.0
        self._timer: asyncio.Handle | None = None

    def add(self, client: str, steps: Iterator[None]) -> None:
        """Run the steps of a request, after waiting ones of the same client."""
        self._waiting.setdefault(client, deque()).append(steps)
        if self._timer is None:
            self._continue()

    def _continue(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._free_s - time.perf_counter()
        self._timer = loop.call_later(wait_s, self._step) if wait_s > 0.0 else loop.call_soon(self._step)

    def _step(self) -> None:
        client, waiting = next(iter(self._waiting.items()))
        began_s = time.perf_counter()
        try:
            has_ended = next(waiting[0], _END) is _END
        except Exception as error:  # noqa: BLE001 -- the others must still have their turn
            background.note("requests", error)
            has_ended = True
        if has_ended:
            waiting.popleft()
        ended_s = time.perf_counter()
        self._free_s = ended_s + (ended_s - began_s) if ended_s - began_s > _SHORT_S else 0.0
        del self._waiting[client]
        if waiting:
            self._waiting[client] = waiting  # behind the others
        self._timer = None
        if self._waiting:
            self._continue()


_END: Final = object()
