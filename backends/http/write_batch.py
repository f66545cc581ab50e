"""Writes of one turn of the event loop, made together at its end.

A write to a socket wakes whoever reads at its other end, and on the way through the kernel throws much of what the next
request needs out of the nearest caches. Made one after the other they wake a reader once for several, and the code of
either side stays where it is: on one machine this takes a tenth of what relaying a request costs, and a quarter where
much is worked out for each (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

MOST_WAIT_S = 0.00025
"""What is written while the first has waited for so long takes all that wait with it: turns may be long."""


class WriteBatch:
    """Holds writes back until the end of a turn, in their order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, bytes]] = []
        self._since_s = 0.0

    def add(self, transport: Any, data: bytes) -> None:
        """Write `data` at the end of the turn, or now, if the first has waited for `MOST_WAIT_S`."""
        waiting = self._waiting
        waiting.append((transport, data))
        if len(waiting) == 1:
            self._since_s = time.perf_counter()
            # What is called soon is called before the loop looks for more to read.
            asyncio.get_running_loop().call_soon(self.flush)
        elif time.perf_counter() - self._since_s > MOST_WAIT_S:
            self.flush()

    def write_now(self, transport: Any, data: bytes) -> None:
        """Write without waiting, after what waits."""
        if self._waiting:
            self.flush()
        transport.write(data)

    def flush(self) -> None:
        """Write all of it now; a transport that has closed meanwhile would drop it anyway."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)


class BatchedTransport:
    """A transport whose writes wait for the end of the turn; in all else it is the one beneath.

    It has the methods of an `asyncio.Transport`, and does not inherit from it, so that it can be compiled.
    """

    __slots__ = ("_batch", "_beneath")

    def __init__(self, beneath: asyncio.Transport, batch: WriteBatch) -> None:
        self._beneath: Any = beneath
        self._batch = batch

    def write(self, data: bytes) -> None:
        """Write at the end of the turn."""
        self._batch.add(self._beneath, data)

    def write_now(self, data: bytes) -> None:
        """Write without waiting: a chunk of a stream is wanted as soon as it is there."""
        self._batch.write_now(self._beneath, data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Write several pieces at the end of the turn."""
        self._batch.add(self._beneath, b"".join(parts))

    def write_eof(self) -> None:
        """Write what waits, and then say that no more will come."""
        self._batch.flush()
        self._beneath.write_eof()

    def close(self) -> None:
        """Close after what waits is written."""
        self._batch.flush()
        self._beneath.close()

    def abort(self) -> None:
        """Close at once."""
        self._beneath.abort()

    def is_closing(self) -> bool:
        """Tell whether it has closed, or is about to."""
        closing: bool = self._beneath.is_closing()
        return closing

    def pause_reading(self) -> None:
        """Read nothing more until `resume_reading`."""
        self._beneath.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._beneath.resume_reading()

    def is_reading(self) -> bool:
        """Tell whether it reads."""
        reading: bool = self._beneath.is_reading()
        return reading

    def can_write_eof(self) -> bool:
        """Tell whether it can say that no more will come."""
        can: bool = self._beneath.can_write_eof()
        return can

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection."""
        return self._beneath.get_extra_info(name, default)

    def get_protocol(self) -> Any:
        """Return who is told of what comes."""
        return self._beneath.get_protocol()

    def set_protocol(self, protocol: Any) -> None:
        """Change who is told of what comes."""
        self._beneath.set_protocol(protocol)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the kernel has not taken yet."""
        size: int = self._beneath.get_write_buffer_size()
        return size

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the marks between which the protocol is told to pause and to resume writing."""
        limits: tuple[int, int] = self._beneath.get_write_buffer_limits()
        return limits

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set these marks."""
        self._beneath.set_write_buffer_limits(high, low)
