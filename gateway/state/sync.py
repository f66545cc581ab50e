"""Synchronizes this process with a store, once a second and off the request path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from uuid import uuid4

from backends import background
from gateway.state.documents import Documents, History
from gateway.state.ledger import Ledger
from gateway.state.store import ERRORS, StateError, Store
from gateway.telemetry.registry import Registry
from policies.statistics import Statistics

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
_MIN_PAUSE_S = 0.2
_MAX_BACKOFF_S = 15.0
_MAX_CPU_SHARE = 0.05
"""Largest share of a core for the exchange; large statistics are exchanged less often."""
_START_TIMEOUT_S = 1.0
_STOP_TIMEOUT_S = 3.0
_CLOSE_TIMEOUT_S = 1.0


class _Series:
    """The series of a store."""

    def __init__(self, registry: Registry, store: str) -> None:
        connected = registry.gauge("gateway_state_connected")
        last_sync = registry.gauge("gateway_state_last_sync_timestamp_seconds")
        errors = registry.counter("gateway_state_errors")
        self.connected, self.last_sync = connected.labels(store), last_sync.labels(store)
        self.errors = {kind: errors.labels(store, kind) for kind in ERRORS}


class State:
    """The state that one gateway process keeps and shares: statistics and documents.

    The store is called in a thread, so a slow or failing store delays no request; the process continues with what it
    knows. It retries a failed attempt after one second, then with pauses that double up to 15 s.
    """

    def __init__(self, store: Store | None, learners: Mapping[str, Statistics], registry: Registry) -> None:
        self._store = store  # the store; None keeps nothing
        self._series = None if store is None else _Series(registry, store.kind)
        self._learners = dict(learners)  # statistics of the models whose policy learns, by model
        self._shared: dict[str, Statistics] = {}  # statistics of rooms, by name
        self._ledgers: dict[str, Ledger] = {}
        self._leaving: list[Ledger] = []  # of statistics no longer followed, until they are written
        self.documents = Documents(self._ask)  # named texts, such as rules
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._task: asyncio.Task[None] | None = None
        self._is_started = False
        self._tried = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failures = 0
        self._told = set[str]()  # kinds of errors logged since the last success

    async def start(self) -> None:
        """Start to synchronize, and wait up to one second for the first read.

        The store is not opened if no policy learns and no document is watched.
        """
        self._is_started = True
        self.follow(self._learners)
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._tried.wait(), _START_TIMEOUT_S)

    def share(self, name: str, statistics: Statistics) -> None:
        """Synchronize the statistics of a room too, under a name that no model has."""
        self._shared[name] = statistics
        self.follow(self._learners)

    def follow(self, learners: Mapping[str, Statistics]) -> None:
        """Synchronize these statistics of models from now on; write dropped ones a last time.

        New statistics get a name of their own in the store. What this process wrote there earlier for the same model is
        read like that of others.
        """
        known = {**learners, **self._shared}
        for name in [*self._ledgers]:
            if known.get(name) is not self._ledgers[name].statistics:
                dropped = self._ledgers.pop(name)
                if self._store is not None:
                    self._leaving.append(dropped)
        for name, statistics in known.items():
            if name not in self._ledgers:
                self._ledgers[name] = Ledger(name, statistics, uuid4().hex)
        self._learners = dict(learners)
        if self._is_started and self._store is not None and (self._ledgers or self.documents.is_watched):
            self._begin(self._store)

    async def stop(self) -> None:
        """Write the last observations, waiting up to three seconds."""
        if self._task is not None and self._store is not None:
            self._stopping.set()
            await asyncio.wait({self._task}, timeout=_STOP_TIMEOUT_S)
            self._task.cancel()
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=False)

    def _begin(self, store: Store) -> None:
        if self._task is None:
            self._task = background.keep_running("state", partial(self._run, store), stopping=self._stopping)

    async def _run(self, store: Store) -> None:
        while not self._stopping.is_set():
            began_s = time.monotonic()
            cpu_s = await self._attempt(store)
            self._tried.set()
            pause_s = max(_MIN_PAUSE_S, PERIOD_S - (time.monotonic() - began_s), cpu_s / _MAX_CPU_SHARE)
            if self._failures:
                pause_s = min(PERIOD_S * 2.0 ** min(self._failures - 1, 10), _MAX_BACKOFF_S) * random.uniform(0.8, 1.2)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        await self._attempt(store)

    async def _attempt(self, store: Store) -> float:
        """Exchange everything; return the CPU seconds that it took."""
        leaving = list(self._leaving)
        ledgers = [*self._ledgers.values(), *leaving]
        for ledger in ledgers:
            ledger.stage()
        loop = asyncio.get_running_loop()
        try:
            changed, cpu_s = await loop.run_in_executor(self._thread, self._exchange, store, ledgers)
        except StateError as error:
            self._note_failure(error)
            return 0.0
        for ledger in ledgers:
            ledger.settle()
        self._leaving = [ledger for ledger in self._leaving if ledger not in leaving]
        self.documents.settle(changed)
        self._note_success(store)
        return cpu_s

    def _exchange(self, store: Store, ledgers: Sequence[Ledger]) -> tuple[dict[str, History], float]:
        """Return the changed documents, and the CPU seconds used."""
        began_s = time.thread_time()
        stamps = store.stamps()
        changed = self.documents.refresh(store, stamps)
        for ledger in ledgers:
            ledger.exchange(store, stamps)
        return changed, time.thread_time() - began_s

    def _note_failure(self, error: StateError) -> None:
        if error.kind not in self._told:
            logger.warning("%s: %s; statistics are kept in memory until the store is back", error.kind, error)
        self._told.add(error.kind)
        self._failures += 1
        if self._series is not None:
            self._series.connected.set(0)
            self._series.errors[error.kind].inc()

    def _note_success(self, store: Store) -> None:
        if self._failures or not self._tried.is_set():
            logger.info("state is kept in %s", store.location)
        self._failures = 0
        self._told.clear()
        if self._series is None:
            return
        self._series.connected.set(1)
        self._series.last_sync.set(time.time())
        for ledger in self._ledgers.values():
            self._series.errors["lost"].inc(ledger.losses)
            ledger.losses = 0

    async def _ask(self, job: Callable[[Store], None]) -> None:
        if self._store is None:
            raise StateError("unreachable", "nothing is kept: the pool file sets `state: none`")
        self._begin(self._store)
        await asyncio.get_running_loop().run_in_executor(self._thread, job, self._store)
