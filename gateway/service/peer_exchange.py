"""The exchange of reports with the peers, some 20 times per second and off the request path.

If it is slow or out of reach, nothing waits: the peers are forgotten after some seconds, and found again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from backends import background
from gateway.service.peers import SILENT_S, Peers
from gateway.state.live import Live
from gateway.state.store import StateError
from gateway.telemetry.metrics import PeerMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 0.04
"""A count is at most two periods old, as the writer and the reader each wait for one."""

_ALONE_PERIOD_S = 0.2
"""The period of a process that knows of no other."""

_FULL_RATE_PROCESSES = 20
"""With more processes than this, all exchange less often, since what is read grows with their square."""

_MAX_CPU_SHARE = 0.05
"""Largest share of a core for the exchange; many keys in use are exchanged less often."""

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 2.0
_LEAVE_S = 1.0


class PeerExchange:
    """Sends the reports of this process, and has `peers` apply those of others."""

    def __init__(self, peers: Peers, live: Live | None, metrics: PeerMetrics) -> None:
        self._peers = peers
        self._live = live  # None for a process without peers
        self._metrics = metrics  # metrics of the exchange
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peers")
        self._task: asyncio.Task[None] | None = None
        self._pending: asyncio.Future[tuple[list[bytes], float]] | None = None
        self._pending_number = self._written = 0
        self._exchanged_s = time.monotonic()
        self._retry_s = 0.0
        self._failures = 0
        self._cpu_s = 0.0

    def start(self) -> None:
        """Begin to exchange reports, if there is anybody to exchange them with."""
        if self._live is not None:
            self._task = background.keep_running("peers", partial(self._run, self._live))

    async def _run(self, live: Live) -> None:
        period_s = PERIOD_S
        while True:
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            self._peers.update()
            self._cpu_s = time.thread_time() - began_cpu_s
            is_reported = await self._exchange(live, period_s)
            began_cpu_s = time.thread_time()
            alive = self._peers.settle(is_reported=is_reported)
            self._metrics.peers.set(alive)
            self._cpu_s += time.thread_time() - began_cpu_s
            period_s = PERIOD_S * max(1.0, (1 + alive) / _FULL_RATE_PROCESSES) if alive else _ALONE_PERIOD_S
            period_s = max(period_s, self._cpu_s / _MAX_CPU_SHARE)
            await asyncio.sleep(max(0.0, period_s - (time.monotonic() - began_s)))

    async def stop(self) -> None:
        """Remove the report of this process, waiting up to a second."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(StateError, TimeoutError):
                leaving = asyncio.get_running_loop().run_in_executor(self._thread, live.leave)
                await asyncio.wait_for(leaving, _LEAVE_S)
        self._thread.shutdown(wait=False)

    async def _exchange(self, live: Live, wait_s: float) -> bool:
        """Return whether the last report has been written, or none could be for long."""
        now_s = time.monotonic()
        if self._pending is None and now_s >= self._retry_s:
            self._pending_number = self._peers.number
            report = self._peers.report if self._pending_number != self._written else b""
            gone = self._peers.gone()

            def call() -> tuple[list[bytes], float]:
                began_s = time.thread_time()
                return live.exchange(report, gone), time.thread_time() - began_s

            self._pending = asyncio.get_running_loop().run_in_executor(self._thread, call)
        if self._pending is not None:
            await asyncio.wait({self._pending}, timeout=wait_s)
            if self._pending.done():
                pending, self._pending = self._pending, None
                if self._apply(pending, live):
                    return True
        return time.monotonic() - self._exchanged_s > SILENT_S

    def _apply(self, done: asyncio.Future[tuple[list[bytes], float]], live: Live) -> bool:
        now_s = time.monotonic()
        try:
            reports, cpu_s = done.result()
        except StateError as error:
            if not self._failures:
                logger.warning("%s: %s; this process goes by its own counts until then", error.kind, error)
            self._retry_s = now_s + min(_FIRST_BACKOFF_S * 2.0 ** min(self._failures, 10), _MAX_BACKOFF_S)
            self._failures += 1
            self._metrics.errors[error.kind].inc()
            return False
        if self._failures or not self._written:
            logger.info("requests in flight and limits are shared through %s", live.location)
        self._failures = 0
        self._written = self._pending_number
        if self._metrics.age is not None:
            self._metrics.age.observe(now_s - self._exchanged_s)
        self._exchanged_s = now_s
        began_s = time.thread_time()
        for report in reports:
            try:
                self._peers.receive(report)
            except ValueError:
                self._metrics.errors["foreign"].inc()
        self._cpu_s += cpu_s + time.thread_time() - began_s
        return True
