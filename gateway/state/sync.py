"""Keeping a store and this process in step, once a second and beside the request path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from gateway.state.documents import Documents
from gateway.state.ledger import Ledger
from gateway.state.store import Document, StateError, Store
from gateway.telemetry.metrics import StateMetrics
from policies.statistics import Statistics

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
_LEAST_PAUSE_S = 0.2
_MAX_BACKOFF_S = 15.0
_CPU_SHARE = 0.05
"""Most of a core that exchanging experience may take: with very much of it, it is done less often."""
_START_S = 1.0
_STOP_S = 3.0


class State:
    """What one gateway process keeps and shares.

    A store that is slow, gone, wiped or back costs requests nothing: it is spoken to in a thread, and the process goes
    on with what it knows. A failed attempt is repeated after a second, then after twice as long, up to 15 s.

    Parameters
    ----------
    store
        None if nothing is to be kept.
    learners
        The experience of each model whose policy has any, by the model's name.
    metrics
        The series of the store; None where there is none.

    Attributes
    ----------
    documents
        Texts that are kept and shared too.
    """

    def __init__(
        self, store: Store | None, learners: Mapping[str, Statistics], metrics: StateMetrics | None = None
    ) -> None:
        self._store = store
        self._metrics = metrics
        writer = uuid4().hex
        self._ledgers = [Ledger(model, statistics, writer) for model, statistics in learners.items()]
        self.documents = Documents(self._ask)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failures = 0
        self._next_exchange_s = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether the last attempt to reach the store succeeded."""
        return self._tried.is_set() and self._store is not None and not self._failures

    async def start(self) -> None:
        """Read what is kept, but wait no longer than a second for it; then go on beside.

        Where nothing is learned and no document watched, nothing is opened or made.
        """
        if self._store is not None and (self._ledgers or self.documents.is_watched):
            self._begin(self._store)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._tried.wait(), _START_S)

    async def stop(self) -> None:
        """Push what was observed last, but wait no longer than three seconds for it."""
        if self._task is not None and self._store is not None:
            self._stopping.set()
            await asyncio.wait({self._task}, timeout=_STOP_S)
            self._task.cancel()
            self._thread.submit(self._store.close)
        self._thread.shutdown(wait=False)

    def _begin(self, store: Store) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(store), name="state")
            self._task.add_done_callback(_report)

    async def _run(self, store: Store) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            await self._attempt(store)
            self._tried.set()
            pause_s = max(_LEAST_PAUSE_S, PERIOD_S - (time.monotonic() - began_s))
            if self._failures:
                pause_s = min(PERIOD_S * 2.0 ** min(self._failures - 1, 10), _MAX_BACKOFF_S) * random.uniform(0.8, 1.2)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        await self._attempt(store)

    async def _attempt(self, store: Store) -> None:
        began_s = time.perf_counter()
        is_due = began_s >= self._next_exchange_s or self._stopping.is_set()
        ledgers = self._ledgers if is_due else []
        for ledger in ledgers:
            ledger.stage()
        loop = asyncio.get_running_loop()
        try:
            changed, cpu_s = await loop.run_in_executor(self._thread, self._exchange, store, ledgers)
        except StateError as error:
            self._note_failure(error)
            return
        for ledger in ledgers:
            ledger.settle()
        self.documents.settle(changed)
        if is_due:
            self._next_exchange_s = began_s + cpu_s / _CPU_SHARE
        self._note_success(store, time.perf_counter() - began_s)

    def _exchange(self, store: Store, ledgers: Sequence[Ledger]) -> tuple[dict[str, tuple[Document, ...]], float]:
        """Return the documents that have changed, and the seconds of a core that all this took."""
        began_s = time.thread_time()
        changed = self.documents.refresh(store)
        for ledger in ledgers:
            ledger.exchange(store)
        return changed, time.thread_time() - began_s

    def _note_failure(self, error: StateError) -> None:
        if not self._failures:
            logger.warning("%s: %s; what is learned stays here until it is back", error.kind, error)
        self._failures += 1
        self.documents.read_again()
        for ledger in self._ledgers:
            ledger.read_again()
        if self._metrics is not None:
            self._metrics.connected.set(0)
            self._metrics.errors[error.kind].inc()

    def _note_success(self, store: Store, took_s: float) -> None:
        if self._failures or not self._tried.is_set():
            logger.info("what is learned is kept in %s", store.place)
        self._failures = 0
        if self._metrics is None:
            return
        self._metrics.connected.set(1)
        self._metrics.last_sync.set(time.time())
        self._metrics.sync.observe(took_s)
        for ledger in self._ledgers:
            self._metrics.pushed.inc(ledger.rows_pushed)
            self._metrics.read.inc(ledger.rows_read)
            self._metrics.errors["lost"].inc(ledger.pages_lost)
            ledger.rows_pushed = ledger.rows_read = ledger.pages_lost = 0

    async def _ask(self, job: Callable[[Store], None]) -> None:
        if self._store is None:
            raise StateError("unreachable", "nothing is kept: the pool file says `state: none`")
        self._begin(self._store)
        await asyncio.get_running_loop().run_in_executor(self._thread, job, self._store)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("nothing is kept or shared any more", exc_info=error)
