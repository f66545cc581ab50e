"""Exchanges reports with the peers, some 20 times per second and off the request path.

Nothing waits for it: if the store is slow or unreachable, peers are forgotten after seconds, and found again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from backends import background
from gateway.peers.live import Live
from gateway.peers.peers import SILENT_S, Peers
from gateway.state.store import StateError
from gateway.telemetry.registry import Registry

logger = logging.getLogger(__name__)

PERIOD_S = 0.04
"""A count is at most two periods old, since the writer and the reader each wait for one."""

_ALONE_PERIOD_S = 0.2
"""The period of a process without peers."""

_FULL_RATE_PROCESSES = 20
"""With more processes than this, all exchange less often, since the total read grows with their square."""

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 2.0
_LEAVE_S = 1.0


class PeerExchange:
    """Writes the reports of this process to one place, and has `peers` apply those of others there."""

    def __init__(self, peers: Peers, live: Live, registry: Registry) -> None:
        self._peers = peers
        self._live = live
        self._alive = registry.gauge("gateway_peers")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peers")
        self._task: asyncio.Task[None] | None = None
        self._written = 0  # number of the last report that was written
        self._exchanged_s = time.monotonic()
        self._failures = 0
        self._told = set[str]()  # kinds of errors logged since the last success
        self._is_foreign_told = False

    def start(self) -> None:
        """Start to exchange reports."""
        self._task = background.keep_running("peers", self._run)

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            self._peers.update()
            is_reported = await self._exchange()
            is_out = began_s - self._exchanged_s > SILENT_S
            alive = self._peers.settle(self, is_reported=is_reported, is_out=is_out)
            self._alive.set(alive)
            period_s = PERIOD_S * max(1.0, (1 + alive) / _FULL_RATE_PROCESSES) if alive else _ALONE_PERIOD_S
            if self._failures:
                period_s = min(_FIRST_BACKOFF_S * 2.0 ** min(self._failures, 10), _MAX_BACKOFF_S)
            await asyncio.sleep(max(0.0, period_s - (time.monotonic() - began_s)))

    async def stop(self) -> None:
        """Remove the report of this process, waiting up to a second."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(StateError, OSError):  # includes the timeout
            leaving = asyncio.get_running_loop().run_in_executor(self._thread, self._live.leave)
            await asyncio.wait_for(leaving, _LEAVE_S)
        self._thread.shutdown(wait=False)

    async def _exchange(self) -> bool:
        """Return whether the last report has been written."""
        number, gone = self._peers.number, self._peers.gone()
        report = self._peers.report if number != self._written else b""
        try:
            reports = await asyncio.get_running_loop().run_in_executor(self._thread, self._live.exchange, report, gone)
        except StateError as error:
            if error.kind not in self._told:
                logger.warning("%s: %s; this gateway goes by its own counts until then", error.kind, error)
            self._told.add(error.kind)
            self._failures += 1
            return False
        if self._failures or not self._written:
            logger.info("requests in flight and limits are shared through %s", self._live.location)
        self._failures, self._written, self._exchanged_s = 0, number, time.monotonic()
        self._told.clear()
        for report in reports:
            with background.guarded("peers", of="a report"):
                self._receive(report)
        return True

    def _receive(self, report: bytes) -> None:
        try:
            self._peers.receive(report)
        except ValueError:
            if not self._is_foreign_told:
                text = "a report at %s is not understood: a process of another version shares nothing with this one"
                logger.warning(text, self._live.location)
            self._is_foreign_told = True
