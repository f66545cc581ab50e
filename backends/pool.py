"""All replicas, and which of them may get requests.

Knowledge about a replica has two sources. Probes poll it every few seconds (`/health`, `/metrics`, and `/v1/models`
before it is admitted). The relay reports the outcome of requests; a refused connection takes effect immediately, so
that the next request goes to another replica before any probe has run. Any other failure may be due to the request, so
it only wakes the probe, and may be a strike. `backends.health` decides what follows from either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mypy_extensions import mypyc_attr

from backends import background
from backends.backend import Backend, EngineChange
from backends.contradictions import Unlike
from backends.health import (
    Alone,
    Books,
    Drain,
    Evidence,
    Health,
    HealthRules,
    Others,
    Probed,
    Served,
    State,
    Strike,
    Unreachable,
    judge,
)
from backends.probe import Probe, ProbeResult
from backends.recovery import Recovery
from backends.watch import Watch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Joining:
    """A replica about to join the pool, and the result of its first probe; None if that did not end in time."""

    watch: Watch
    result: ProbeResult | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class Listener:
    """Gets events of a pool's replicas. Each handler does nothing unless a subclass overrides it."""

    def went_down(self, backend: Backend) -> None:
        """Handle that a replica went down: its requests can be retried. An ejected one may still answer."""

    def became_ready(self, backend: Backend) -> None:
        """Handle that a replica may get more requests than before."""

    def was_ejected(self, backend: Backend, duration_s: float, reason: str) -> None:
        """Handle that a replica was ejected on this process's own evidence, not by `Ejected`."""

    def engine_changed(self, backend: Backend, change: EngineChange) -> None:
        """Handle an engine's change, as its metrics show it."""

    def difference_changed(self, backend: Backend) -> None:
        """Handle that the `difference` of a replica appeared, changed or disappeared."""

    def reported_implausible(self, backend: Backend, what: str) -> None:
        """Handle that a replica reported an impossible value; `what` names it."""

    def books(self, backend: Backend) -> Books:
        """Return what this process knows about its requests at a replica."""
        return Books(backend.read_s)


class Pool:
    """Every replica of every model, with its current state.

    Examples
    --------
    >>> from backends.speculation import Method
    >>> backend = Backend("a", "llama", Method.BASELINE, "http://127.0.0.1:8001")
    >>> pool = Pool([backend], HealthRules())
    >>> pool.up("llama")
    []
    >>> pool.report(backend, Drain())
    True
    >>> backend.health.reason
    'drained by an operator'
    """

    def __init__(
        self,
        backends: Iterable[Backend],
        rules: HealthRules,
        probe: Callable[[Backend, float], Probe] = Probe,
    ) -> None:
        self.rules = rules  # health checks and ejection
        self._probe = probe  # factory of a probe from a replica and a time-out in seconds
        self._by_model: dict[str, list[Backend]] = {}
        self._watches: dict[tuple[str, str], Watch] = {}
        for backend in backends:
            self._by_model.setdefault(backend.model, []).append(backend)
            watch = Watch(backend, probe(backend, rules.timeout_s), rules)
            self._watches[backend.model, backend.name] = watch
        self.recovery = Recovery(rules.slow_start_s)  # the replicas that recover
        self._listener = Listener()
        self.unlike = Unlike()  # how engines of a model differ
        self._is_started = False
        self._closing: set[asyncio.Task[None]] = set()

    def listen(self, listener: Listener) -> None:
        """Register the listener; it needs the relay, so it cannot exist before the pool."""
        self._listener = listener

    async def start(self) -> None:
        """Start probing."""
        self._is_started = True
        for backend in self:
            self.watch(backend).start(self._judge)

    async def wait_until_probed(self, timeout_s: float) -> None:
        """Wait until every replica has been probed once, for at most `timeout_s` seconds.

        A worker gets its share of new connections as soon as it listens, and would refuse requests until it knows which
        replicas are up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for watch in self._watches.values():
                    await watch.probed.wait()

    async def stop(self) -> None:
        """Stop probing."""
        self._is_started = False
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        for watch in self._watches.values():
            await watch.probe.close()

    # Replicas that come and go.

    async def probe(self, backends: Iterable[Backend], rules: HealthRules, timeout_s: float) -> list[Joining]:
        """Probe replicas that are about to join, concurrently, for at most `timeout_s` seconds.

        The caller must pass the result to `update`, or close the probes.
        """
        probes = [(backend, self._probe(backend, rules.timeout_s)) for backend in backends]
        joining = [Joining(Watch(backend, probe, rules)) for backend, probe in probes]

        async def run(each: Joining) -> None:
            each.result = await each.watch.probe_now(admit=True)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(run(each) for each in joining))
        return joining

    def update(self, backends: Collection[Backend], joining: Iterable[Joining], rules: HealthRules) -> None:
        """Replace the replicas and the rules.

        A replica that leaves gets no further requests and no probes; the relay may report on its requests in flight
        until `forget`. A drained name stays drained if another replica takes it.
        """
        self.rules = rules
        self.recovery.slow_start_s = rules.slow_start_s
        staying, joining = {id(backend) for backend in backends}, list(joining)
        leaving = [backend for backend in self if id(backend) not in staying]
        self._by_model = {}
        for backend in backends:
            self._by_model.setdefault(backend.model, []).append(backend)
        for watch in self._watches.values():
            watch.rules = rules
            watch.probe.set_timeout(rules.timeout_s)
        for backend in leaving:
            self._dismiss(self.watch(backend))
        for members in self._by_model.values():
            self.unlike.compare(members)
        for each in joining:
            self._admit(each.watch)
        for each in joining:  # which may send requests to any replica
            if each.result is not None:
                self._judge(each.watch, each.result)
                each.watch.probed.set()

    def forget(self, backend: Backend) -> None:
        """Drop what is known about a replica that left and whose requests have ended."""
        watch = self._watches.get((backend.model, backend.name))
        if watch is not None and watch.has_left:  # else another replica has the name
            del self._watches[backend.model, backend.name]

    def _dismiss(self, watch: Watch) -> None:
        watch.has_left = True
        if watch.task is not None:
            watch.task.cancel()
        task = background.start("probes", watch.probe.close(), of=watch.label)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        backend = watch.backend
        backend.health = replace(backend.health, state=State.DRAINING, reason="removed from the pool")
        self.recovery.follow(backend)
        logger.info("%s has left the pool, with %d requests", watch.label, backend.in_flight)

    def _admit(self, watch: Watch) -> None:
        backend = watch.backend
        before = self._watches.get((backend.model, backend.name))
        self._watches[backend.model, backend.name] = watch
        if before is not None and before.backend.health.is_drained:
            self.report(backend, Drain())
        if before is not None and backend.launched and before.backend.declared != backend.declared:
            metrics = before.backend.engine.metrics
            watch.ending_started_s = metrics.started_s or None if metrics is not None else None
        if self._is_started:
            watch.start(self._judge)

    # What is known.

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over all backends, model by model."""
        for backends in self._by_model.values():
            yield from backends

    def of(self, model: str) -> Sequence[Backend]:
        """Return all replicas of a model, in the order of the pool file."""
        return self._by_model.get(model, ())

    def up(self, model: str) -> list[Backend]:
        """Return the replicas of a model that are up."""
        return [backend for backend in self._by_model.get(model, ()) if backend.health.state is State.UP]

    def watch(self, backend: Backend) -> Watch:
        """Return the watch of a replica."""
        return self._watches[backend.model, backend.name]

    # Evidence: from the relay, from other gateway processes, and from an operator.

    def report_failure(self, backend: Backend) -> None:
        """Probe a replica now, as a request failed there, perhaps by its own fault."""
        self.watch(backend).wake.set()

    def report_timeout(self, backend: Backend, request: int, message: str, silent_s: float) -> None:
        """Record that a replica did not answer in time; by itself, that is no evidence, as it may be slow.

        It is a strike if the engine has no metrics that could show it at work, or reports no requests, and if it was
        silent only since it is in service: the request may have been lost with an earlier engine.
        """
        self.report_failure(backend)
        if not self.watch(backend).is_at_work:
            self.report(backend, Strike(request, message, at_s=time.monotonic() - silent_s))

    def report(self, backend: Backend, evidence: Evidence) -> bool:
        """Apply evidence of a replica's health; return whether its state changed."""
        watch, now_s = self.watch(backend), time.monotonic()
        if watch.backend is not backend:
            return False  # it has left, and another has its name
        if isinstance(evidence, Strike | Unreachable):
            watch.wake.set()
            watch.probe.was_refused |= isinstance(evidence, Unreachable)
        members = [other for other in self.up(backend.model) if other is not backend]
        longest_up_s = max((now_s - other.health.up_since_s for other in members), default=0.0)
        others = Others(len(members), longest_up_s, self.recovery.trials(backend))
        before = backend.health
        after = backend.health = judge(before, evidence, others, self.rules, now_s)
        if after is not before:
            self._follow(watch, before)
        if after.state is State.EJECTED is not before.state and isinstance(evidence, Strike):
            with background.guarded("probes", of=watch.label):
                self._listener.was_ejected(backend, after.ejection_s, evidence.message)
        return after.state is not before.state

    def report_success(self, backend: Backend) -> None:
        """Record a request for inference that the replica served or, on trial, began to answer."""
        health = backend.health
        if health.state is _RECOVERING or health.strikes:
            self.report(backend, Served())

    def _judge(self, watch: Watch, result: ProbeResult) -> None:
        """Apply the result of a probe."""
        backend, now_s = watch.backend, time.monotonic()
        if result.engine is not None and result.engine.started_s == watch.ending_started_s:
            result = ProbeResult("another engine is started in its place", is_certain=True)
        watch.serves = result.serves
        self.unlike.compare_names(backend.model, [self.watch(each).serves for each in self.of(backend.model)])
        for what in result.ignored:
            self._listener.reported_implausible(backend, what)
        difference, said = backend.difference, backend.engine.said
        context_tokens, root = said.context_tokens, said.root
        for change in watch.take(result, now_s):
            with background.guarded("probes", of=watch.label):
                self._listener.engine_changed(backend, change)
        if (backend.engine.said.context_tokens, backend.engine.said.root) != (context_tokens, root):
            self.unlike.compare(self.of(backend.model))
        if backend.difference != difference:
            with background.guarded("probes", of=watch.label):
                self._listener.difference_changed(backend)
        books = Books(backend.read_s)
        if backend.in_flight:
            with background.guarded("probes", of=watch.label):
                books = self._listener.books(backend)
        was, proof = backend.health, (result.is_certain, result.is_proven)
        self.report(backend, Probed(result.problem, result.refused, result.engine, *proof, books))
        is_said = result.problem in {None, was.reason} or was.state is not State.DOWN
        if result.is_certain and not is_said:  # as when an engine that was down comes back with another model
            logger.warning("%s is still down: %s", watch.label, result.problem)

    def _follow(self, watch: Watch, before: Health) -> None:
        """Announce a change of a replica's health."""
        backend, was = watch.backend, before.state
        state, reason = backend.health.state, backend.health.reason
        if state is not was:
            level = logging.WARNING if state in {State.DOWN, State.EJECTED} else logging.INFO
            logger.log(level, "%s is %s%s", watch.label, state, f": {reason}" if reason else "")
        elif state is State.STARTING and reason != before.reason and not backend.launched:
            logger.warning("%s cannot be reached yet: %s", watch.label, reason)
        self.recovery.follow(backend)
        if was is State.UP and state is not was and not self.up(backend.model):
            for other in self.of(backend.model):
                if other.health.state is State.EJECTED:
                    self.watch(other).wake.set()  # it returns with its next probe
                else:
                    self.report(other, Alone())
        with background.guarded("probes", of=watch.label):
            if state is State.DOWN and was is not State.DOWN:
                self._listener.went_down(backend)
            if state is State.RECOVERING or (state is State.UP and was is not State.UP):
                self._listener.became_ready(backend)


# Every use looks up an enumeration's member, and every request uses this one.
_RECOVERING: Final = State.RECOVERING
