"""Batching of the socket writes of one event loop iteration.

A write to a socket wakes the reader at the other end and evicts much of what the next request needs from the CPU's
caches. Consecutive writes wake a reader once for several requests and keep the caches warm. On one machine this saved
a tenth of the cost of relaying a request, and a quarter with much computation per request (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import time
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
