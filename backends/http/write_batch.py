"""Batching of the socket writes of one event loop iteration.

A write to a socket wakes the reader at the other end and evicts much of what the next request needs from the CPU's
caches. Consecutive writes wake a reader once for several requests and keep the caches warm. On one machine this saved
a tenth of the cost of relaying a request, and a quarter with much computation per request (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

MAX_WAIT_S = 0.00025
"""Seconds after which the next write flushes the batch, since an iteration of the event loop can be long."""


class WriteBatch:
    """Writes held back, in order, until the end of the event loop iteration."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, bytes]] = []
        self._since_s = 0.0

    def add(self, transport: Any, data: bytes) -> None:
        """Write `data` at the end of the iteration, or now if the first write has waited for `MAX_WAIT_S`."""
        waiting = self._waiting
        waiting.append((transport, data))
        if len(waiting) == 1:
            self._since_s = time.perf_counter()
            # Runs before the event loop polls the sockets again.
            asyncio.get_running_loop().call_soon(self.flush)
        elif time.perf_counter() - self._since_s > MAX_WAIT_S:
            self.flush()

    def write_now(self, transport: Any, data: bytes) -> None:
        """Write now, after the writes that wait."""
        if self._waiting:
            self.flush()
        transport.write(data)

    def flush(self) -> None:
        """Write everything now, except to transports that have closed."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)


class BatchedTransport:
    """A wrapper of a transport that delays its writes until the end of the event loop iteration.

    It implements `asyncio.Transport` without inheriting from it, so that mypyc can compile it.
    """

    __slots__ = ("_batch", "_transport")

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch) -> None:
        self._transport: Any = transport
        self._batch = batch

    def write(self, data: bytes) -> None:
        """Write at the end of the iteration."""
        self._batch.add(self._transport, data)

    def write_now(self, data: bytes) -> None:
        """Write now, as for a chunk of a stream."""
        self._batch.write_now(self._transport, data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Write several parts at the end of the iteration."""
        self._batch.add(self._transport, b"".join(parts))

    def write_eof(self) -> None:
        """Write what waits, and close the sending direction."""
        self._batch.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Write what waits, and close."""
        self._batch.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close immediately, and drop what waits."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether it is closed or closing."""
        closing: bool = self._transport.is_closing()
        return closing

    def pause_reading(self) -> None:
        """Stop reading until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        """Return whether it is reading."""
        reading: bool = self._transport.is_reading()
        return reading

    def can_write_eof(self) -> bool:
        """Return whether it can close the sending direction alone."""
        can: bool = self._transport.can_write_eof()
        return can

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection, as `asyncio.BaseTransport` does."""
        return self._transport.get_extra_info(name, default)

    def get_protocol(self) -> Any:
        """Return the protocol."""
        return self._transport.get_protocol()

    def set_protocol(self, protocol: Any) -> None:
        """Set the protocol."""
        self._transport.set_protocol(protocol)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes buffered outside the kernel."""
        size: int = self._transport.get_write_buffer_size()
        return size

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the low and high limits at which the protocol's writing resumes and pauses."""
        limits: tuple[int, int] = self._transport.get_write_buffer_limits()
        return limits

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits at which the protocol's writing pauses and resumes."""
        self._transport.set_write_buffer_limits(high, low)
