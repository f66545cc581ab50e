"""Connections in memory: bytes go to a protocol of asyncio without a socket, on a real event loop."""

from __future__ import annotations

import asyncio
import atexit
import random
import re
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

_BEGIN = re.compile(rb"(?:GET|POST) |(?<! )HTTP/1\.")
_Result = TypeVar("_Result")
_loop: asyncio.AbstractEventLoop | None = None


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on an event loop that all executions share, since making one takes a millisecond."""
    global _loop  # noqa: PLW0603 -- made on first use, in the process that uses it
    if _loop is None:
        _loop = asyncio.new_event_loop()
        atexit.register(_loop.close)
    return _loop.run_until_complete(coroutine)


def cut(data: bytes, seed: int) -> list[bytes]:
    """Return `data` in pieces, as reads from a socket could return it.

    Parameters
    ----------
    seed
        0: one piece; 1: single bytes; others: random places and, if `cuts_messages`, where a request or an answer may
        begin, as a client sends that waits for the answers.
    """
    if seed == 0 or not data:
        return [data]
    if seed == 1:
        return [data[at : at + 1] for at in range(len(data))]
    draw = random.Random(seed)
    starts = {draw.randrange(len(data)) for _ in range(seed % 7 - 2)}
    if cuts_messages(seed):
        starts.update(begin.start() for begin in _BEGIN.finditer(data))
    ends = [*sorted(starts - {0}), len(data)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def cuts_messages(seed: int) -> bool:
    """Return whether `cut` cuts where messages begin."""
    return seed % 2 == 0 and seed > 0


class MemoryTransport:
    """A transport that keeps what is written, and delivers what it is given as asyncio's transports do."""

    def __init__(self, protocol: Any) -> None:
        self.written = bytearray()
        self.unread: deque[bytes] = deque()
        self.is_lost = False
        self._protocol = protocol
        self._closing = False
        self._paused = False
        protocol.connection_made(self)

    def deliver(self, pieces: list[bytes]) -> None:
        """Feed pieces to the protocol until it closes or pauses reading."""
        self.unread.extend(pieces)
        while self.unread and not (self._paused or self._closing):
            self._protocol.data_received(self.unread.popleft())

    async def settle(self) -> None:
        """Run what the event loop has to do, and deliver what can be read then, until nothing happens any more."""
        before = None
        while before != (before := (len(self.written), len(self.unread), self.is_lost)):
            for _ in range(4):
                await asyncio.sleep(0)
            self.deliver([])

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.written += part

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None: ...

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int) -> None:
        """Write everything at once, whatever it is."""

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.lose)

    abort = close

    def lose(self) -> None:
        """End the connection, as if the peer had gone."""
        self._closing = True
        if not self.is_lost:
            self.is_lost = True
            self._protocol.connection_lost(None)
