"""All replicas, and which of them may be sent requests.

The state of a replica has two sources. Probes poll it every few seconds (`/health`, `/metrics`, and `/v1/models` before
it is admitted). The relay reports the outcome of requests; a refused connection takes effect immediately, so that the
next request goes to another replica before any probe has run. Any other failure may be due to the request, so it only
wakes the probe; a replica is ejected on strikes, each of them evidence against it (`Pool.report_strike`). How it comes
back is in `backends.recovery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVarTuple

from backends import background
from backends.backend import Backend, EngineChange, EngineLoad, State
from backends.contradictions import compare
from backends.engine_metrics import EngineMetrics, change_between
from backends.lateness import Lateness
from backends.occupancy import Minute, Occupancy
from backends.probe import Probe, ProbeResult
from backends.recovery import Recovery
from backends.step_comparison import StepComparison

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a replica is removed from service, and when it returns."""

    # interval_s, timeout_s: seconds between two probes of a replica, and until a probe times out.
    interval_s: float = 2.0
    timeout_s: float = 2.0
    # Consecutive probes that must fail or time out before a replica that was up is down. A refused connection needs no
    # second probe: nothing listens there.
    failures: int = 2
    # eject_s, eject_max_s: seconds of the first ejection, and of the longest. A replica that is ejected again within
    # `eject_max_s` of its return stays out twice as long.
    eject_s: float = 2.0
    eject_max_s: float = 60.0
    # Seconds until a replica that comes back may have as many requests as the others. One that was down starts slowly
    # only if another one has been up for as long; else all have just started.
    slow_start_s: float = 10.0
    # Different requests in a row whose failure is the replica's fault, at which it is ejected; one is enough while it
    # recovers.
    strikes: int = 3
    # Seconds without a new token and without a change of the KV cache after which a replica that has requests is down,
    # even if it answers probes.
    stall_s: float = 30.0


_PROBES_WHILE_LATE = 5
_LATE_SHARE = 0.1
"""Share of a probe's time-out by which the event loop may be late before the probe says nothing about the replica."""
_SERVING = frozenset({State.UP, State.RECOVERING})


def _tokens_per_step(engine: EngineMetrics, backend: Backend) -> float:
    """Return the mean tokens per step that an engine counts, of which one that drafts k gives k + 1 at most."""
    return min(engine.generation_tokens / engine.steps, _most_per_step(backend)) if engine.steps else 0.0


Told = TypeVarTuple("Told")


@dataclass(slots=True)
class _Record:
    """The pool's record of one replica."""

    probe: Probe
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    failed_probes: int = 0
    strikes: set[int] = field(default_factory=set)  # the requests, each counted once
    ejection_s: float = 0.0  # the length of the last ejection
    ejected_until_s: float = -math.inf
    up_since_s: float = math.inf  # unknown if it was up from the start
    drained: bool = False
    engine: EngineMetrics | None = None
    occupancy: Occupancy = field(default_factory=Occupancy)
    comparison: StepComparison = field(default_factory=StepComparison)
    progress: tuple[int, int, float] = (-1, -1, -1.0)  # tokens of prompts and answers, KV usage; no engine reports -1
    progress_at_s: float = 0.0
    has_stalled: bool = False  # since it was last up
    peers_in_flight: int = 0  # requests that other gateway processes have in flight to it
    foreign: int = 0  # requests in the engine that no known gateway process has sent
    watch: asyncio.Task[None] | None = None
    has_left: bool = False  # the pool, though requests to it may be in flight


@dataclass(slots=True)
class Joining:
    """A replica that is about to join the pool, with its probe and the result of the first one."""

    backend: Backend
    probe: Probe
    result: ProbeResult | None  # none if the probe did not end in time


class Pool:
    """Every replica of every model, with its current state.

    Examples
    --------
    >>> from backends.speculation import Method
    >>> backend = Backend("a", "llama", Method.BASELINE, "http://127.0.0.1:8001")
    >>> pool = Pool([backend], HealthRules())
    >>> pool.up("llama")
    []
    >>> pool.set_drained(backend, drained=True)
    >>> backend.state_reason
    'drained by an operator'
    """

    def __init__(
        self,
        backends: Iterable[Backend],
        rules: HealthRules,
        probe: Callable[[Backend, float], Probe] = Probe,
    ) -> None:
        self.rules = rules  # health checks and ejection
        self._probe = probe  # factory of a replica's probe, called with the replica and the time-out in seconds
        self._by_model: dict[str, list[Backend]] = {}
        self._records: dict[tuple[str, str], _Record] = {}
        for backend in backends:
            self._by_model.setdefault(backend.model, []).append(backend)
            self._records[backend.model, backend.name] = _Record(probe(backend, rules.timeout_s))
        self.recovery = Recovery(rules.slow_start_s)  # the replicas on their way back
        # Called with a replica that went down, so that its requests without a first byte can be retried. One that is
        # ejected may still answer those that it has.
        self.on_down: Callable[[Backend], None] | None = None
        # Called with a replica that may be sent more requests than before.
        self.on_ready: Callable[[Backend], None] | None = None
        # Called with a replica, the seconds and the reason when it is ejected on evidence that this process has; not by
        # `eject`.
        self.on_eject: Callable[[Backend, float, str], None] | None = None
        # Called with a replica whose engine went through a change, as its metrics show.
        self.on_engine_change: Callable[[Backend, EngineChange], None] | None = None
        # Called with a replica and the name of what it reported that cannot be.
        self.on_implausible: Callable[[Backend, str], None] | None = None
        # Called with a replica whose `difference` is new, another one or gone.
        self.on_difference: Callable[[Backend], None] | None = None
        self._is_started = False
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start probing."""
        self._is_started = True
        for backend in self:
            self._start_watch(backend)

    def _start_watch(self, backend: Backend) -> None:
        record = self._records[backend.model, backend.name]
        of = f"{backend.model}/{backend.name}"
        record.watch = background.keep_running("probes", partial(self._watch, backend), of=of)

    async def wait_until_probed(self, timeout_s: float) -> None:
        """Wait until every replica has been probed once, for at most `timeout_s` seconds.

        A worker gets its share of new connections as soon as it listens, and would refuse requests until it knows
        which replicas are up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for record in self._records.values():
                    await record.probed.wait()

    async def stop(self) -> None:
        """Stop probing."""
        self._is_started = False
        tasks = [record.watch for record in self._records.values() if record.watch is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        for record in self._records.values():
            await record.probe.close()

    # Replicas that come and go.

    async def probe(self, backends: Iterable[Backend], rules: HealthRules, timeout_s: float) -> list[Joining]:
        """Probe replicas that are about to join, all at once, for at most `timeout_s` seconds.

        The caller passes the result to `update`, or closes the probes.
        """
        joining = [Joining(backend, self._probe(backend, rules.timeout_s), None) for backend in backends]

        async def run(each: Joining) -> None:
            each.result = await self._probed(each.probe, admit=True)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(run(each) for each in joining))
        return joining

    def update(self, backends: Collection[Backend], joining: Iterable[Joining], rules: HealthRules) -> None:
        """Replace the replicas and the rules.

        A replica that leaves gets no further requests and no probes. What the relay reports of its requests in flight
        is accepted until `forget`. A replica that is drained stays so if another one takes its name.
        """
        self.rules = rules
        self.recovery.slow_start_s = rules.slow_start_s
        staying = {id(backend) for backend in backends}
        leaving = [backend for backend in self if id(backend) not in staying]
        self._by_model = {}
        for backend in backends:
            self._by_model.setdefault(backend.model, []).append(backend)
        for record in self._records.values():
            record.probe.set_timeout(rules.timeout_s)
        for backend in leaving:
            self._dismiss(backend)
        joined = [(each, self._admit(each)) for each in joining]
        for each, record in joined:  # which may send requests, to any of them
            if each.result is not None:
                self._judge(each.backend, record, each.result)
                record.probed.set()

    def forget(self, backend: Backend) -> None:
        """Drop the record of a replica that left and whose requests have ended."""
        record = self._records.get((backend.model, backend.name))
        if record is not None and record.has_left:  # else another replica has the name
            del self._records[backend.model, backend.name]

    def _dismiss(self, backend: Backend) -> None:
        record = self._records[backend.model, backend.name]
        record.has_left = True
        if record.watch is not None:
            record.watch.cancel()
        task = background.start("probes", record.probe.close(), of=f"{backend.model}/{backend.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self.recovery.leave(backend)
        backend.state, backend.state_reason = State.DRAINING, "removed from the pool"
        logger.info("%s/%s has left the pool, with %d requests", backend.model, backend.name, backend.in_flight)

    def _admit(self, joining: Joining) -> _Record:
        backend, key = joining.backend, (joining.backend.model, joining.backend.name)
        before = self._records.get(key)
        record = self._records[key] = _Record(joining.probe)
        if before is not None and before.drained:
            record.drained = True
            self._set(backend, State.DRAINING, "drained by an operator")
        if self._is_started:
            self._start_watch(backend)
        return record

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over all backends, model by model."""
        for backends in self._by_model.values():
            yield from backends

    def of(self, model: str) -> Sequence[Backend]:
        """Return all replicas of a model, in the order of the pool file."""
        return self._by_model.get(model, ())

    def up(self, model: str) -> list[Backend]:
        """Return the replicas of a model that are up."""
        return [backend for backend in self._by_model.get(model, ()) if backend.state is State.UP]

    def engine(self, backend: Backend) -> EngineMetrics | None:
        """Return the replica's last metrics page; None if none was read."""
        return self._records[backend.model, backend.name].engine

    def tokens_per_step(self, backend: Backend) -> dict[str, float] | None:
        """Return the tokens per step of late, as shown by a replica's answers and as counted; None if not compared."""
        return self._records[backend.model, backend.name].comparison.figures(_most_per_step(backend))

    def minutes(self, backend: Backend) -> tuple[Minute, ...]:
        """Return how many requests a replica had, and how many of them waited for what, by minute."""
        return tuple(self._records[backend.model, backend.name].occupancy.minutes)

    async def reported_temperature(self, backend: Backend) -> float | None:
        """Ask a replica for the temperature that it takes for a request without one; None if it does not say."""
        record = self._records.get((backend.model, backend.name))  # it may have left while others were asked
        return None if record is None else await record.probe.default_temperature()

    def model_card(self, model: str) -> dict[str, object] | None:
        """Return the model's entry in the `/v1/models` of a replica that is or was up; None if there is none yet."""
        cards = (self._records[model, backend.name].probe.model_card for backend in self.of(model))
        return next((card for card in cards if card is not None), None)

    # Called by the relay.

    def report_failure(self, backend: Backend) -> None:
        """Probe a replica now, since a request failed there, perhaps through a fault of its own."""
        self._records[backend.model, backend.name].wake.set()

    def report_unreachable(self, backend: Backend, message: str) -> None:
        """Take a replica out that accepts no connection; no request can be the cause of that."""
        self._set(backend, State.DOWN, message)
        self.report_failure(backend)

    def report_strike(self, backend: Backend, request: int, message: str) -> None:
        """Record evidence against a replica: it failed a request that another one served, or broke the connection.

        The last replica of its model that is up is not ejected: any replica is better than none.
        """
        self.report_failure(backend)
        record = self._records[backend.model, backend.name]
        if backend.state not in _SERVING:
            return  # of a request that was sent before
        if len(record.strikes) < self.rules.strikes:
            record.strikes.add(request)
        if len(record.strikes) >= self.rules.strikes or backend.state is State.RECOVERING:
            duration_s = self._ejection_s(record)
            if self.eject(backend, duration_s, message):
                self._call(self.on_eject, backend, duration_s, message)

    def report_timeout(self, backend: Backend, request: int, message: str) -> None:
        """Record that a replica did not answer in time, which alone is no evidence: it may be slow.

        It is a strike if the engine has no metrics that could show it at work, or reports that it has no request.
        """
        if self.is_at_work(backend):
            self.report_failure(backend)
        else:
            self.report_strike(backend, request, message)

    def is_at_work(self, backend: Backend) -> bool:
        """Return whether the replica's metrics report that it has requests."""
        engine = self.engine(backend)
        return engine is not None and engine.running + engine.waiting > 0

    def can_spare(self, backend: Backend) -> bool:
        """Return whether more than half of the replicas of its model are up without this one."""
        return 2 * self._others_up(backend) > len(self.of(backend.model))

    def _others_up(self, backend: Backend) -> int:
        return sum(other is not backend for other in self.up(backend.model))

    def is_progressing(self, backend: Backend) -> bool:
        """Return whether the replica's metrics have changed of late while it had requests."""
        late_s = 2.0 * (self.rules.interval_s + self.rules.timeout_s)
        record = self._records[backend.model, backend.name]
        return self.is_at_work(backend) and time.monotonic() - record.progress_at_s <= late_s

    def report_success(self, backend: Backend) -> None:
        """Record a request for inference that the replica served, or whose answer it has begun if it is on trial."""
        record = self._records[backend.model, backend.name]
        if record.strikes:
            record.strikes.clear()
        if backend.state is State.RECOVERING and self.recovery.is_on_trial(backend):
            self._advance(backend, time.monotonic(), served=True)

    def eject(self, backend: Backend, duration_s: float, reason: str) -> bool:
        """Take a replica out for a time, if another one of its model is up; return whether it was taken out."""
        if backend.state not in _SERVING or not self._others_up(backend):
            return False
        record = self._records[backend.model, backend.name]
        record.ejection_s = duration_s
        record.ejected_until_s = time.monotonic() + duration_s
        self._set(backend, State.EJECTED, f"{reason}; ejected for {duration_s:.3g} s")
        return True

    # Called for the peers: other processes that serve the same pool.

    def set_peers_in_flight(self, backend: Backend, in_flight: int, *, recounted: int = 0) -> None:
        """Set how many requests other gateway processes have in flight to a replica."""
        record = self._records[backend.model, backend.name]
        record.peers_in_flight = in_flight
        record.foreign = max(0, record.foreign - recounted)
        load, others = backend.load, record.foreign + in_flight
        if others != load.others:
            # An engine that has never reported is known by what the gateways sent.
            running, at_s = (load.running, load.at_s) if load.at_s else (backend.in_flight + others, 0.0)
            backend.load = replace(load, running=running, others=others, at_s=at_s or time.monotonic())

    # Called for an operator.

    def set_drained(self, backend: Backend, *, drained: bool) -> None:
        """Drain a replica, whose requests in flight may finish, or readmit it once its next probe succeeds."""
        record = self._records[backend.model, backend.name]
        if record.drained == drained:
            return
        record.drained = drained
        if drained:
            self._set(backend, State.DRAINING, "drained by an operator")
        else:
            self._set(backend, State.STARTING, "readmitted by an operator, not yet checked")
            record.wake.set()

    # Probing.

    async def _probed(self, probe: Probe, *, admit: bool) -> ProbeResult:
        """Probe a replica; whatever becomes of a probe, there is a next one, or the replica would never come back.

        A replica that is late while this process is late itself is probed again before it is blamed.
        """
        for _ in range(_PROBES_WHILE_LATE):
            with Lateness() as lateness:
                result = await self._probed_once(probe, admit=admit)
            if not result.late or lateness.longest_s < _LATE_SHARE * self.rules.timeout_s:
                break
            logger.warning("this process was late by %.1f s: a probe that timed out is repeated", lateness.longest_s)
        return result

    async def _probed_once(self, probe: Probe, *, admit: bool) -> ProbeResult:
        try:
            async with asyncio.timeout(5.0 * self.rules.timeout_s):
                return await probe.run(admit=admit)
        except Exception as error:  # noqa: BLE001 -- an OSError that httpx does not know, say
            logger.warning("a probe failed: %s", type(error).__name__)
            return ProbeResult(f"cannot be probed ({type(error).__name__})", late=isinstance(error, TimeoutError))

    async def _watch(self, backend: Backend) -> None:
        record = self._records[backend.model, backend.name]
        while True:
            record.wake.clear()
            result = await self._probed(record.probe, admit=backend.state not in _SERVING)
            self._judge(backend, record, result)
            record.probed.set()
            pause_s = self.rules.interval_s
            if backend.state is State.STARTING:
                pause_s = min(pause_s, 0.25)  # the start of the gateway waits for it
            elif backend.state is State.EJECTED:
                pause_s = min(pause_s, max(0.05, record.ejected_until_s - time.monotonic()))
            try:
                async with asyncio.timeout(pause_s):
                    await record.wake.wait()
                await asyncio.sleep(min(0.1, self.rules.interval_s))  # reports come in bursts: one probe for all
            except TimeoutError:
                pass

    def _judge(self, backend: Backend, record: _Record, result: ProbeResult) -> None:
        now_s = time.monotonic()
        backend.context_tokens = record.probe.context_tokens
        if self.on_implausible is not None:
            for what in result.ignored:
                self.on_implausible(backend, what)
        if result.engine is not None:
            before, engine = record.engine, result.engine
            record.engine = engine
            record.occupancy.add(engine)
            if before is not None and (change := change_between(before, engine)) is not None:
                logger.info("%s/%s: its engine has changed %s", backend.model, backend.name, change.replace("_", " "))
                self._call(self.on_engine_change, backend, change)
            self._compare(backend, engine)
            self._compare_steps(backend, record, engine, now_s)
            others = max(record.peers_in_flight, engine.running + engine.waiting - backend.in_flight)
            record.foreign = others - record.peers_in_flight
            backend.load = EngineLoad(
                engine.running,
                engine.waiting,
                engine.kv_usage,
                others,
                at_s=now_s,
                kv_tokens=engine.kv_tokens,
                tokens_per_step=_tokens_per_step(engine, backend),
                drafts=engine.drafts,
                accepted_tokens=engine.accepted_tokens,
            )
        if record.drained:
            return
        if result.problem is not None:
            record.failed_probes += 1
            certain = result.refused or backend.state not in _SERVING or record.failed_probes >= self.rules.failures
            if backend.state is State.STARTING and result.refused:
                self._note_unreachable(backend, result.problem)
            elif certain:
                self._set(backend, State.DOWN, result.problem)
            return
        record.failed_probes = 0
        if self._is_stalled(backend, record, now_s):
            record.has_stalled = True
            self._set(backend, State.DOWN, f"has requests but produced no token for {self.rules.stall_s:g} s")
        elif backend.state is State.RECOVERING:
            self._advance(backend, now_s)
        elif backend.state is not State.UP:
            self._return(backend, record, now_s)

    def _compare(self, backend: Backend, engine: EngineMetrics) -> None:
        """Compare how a replica was said to speculate with what its engine counts; from then on, that holds."""
        method, schedule = backend.method, backend.draft_schedule
        if not compare(backend, engine):
            return
        if backend.contradictions:
            logger.warning("%s/%s: %s", backend.model, backend.name, backend.contradiction)
        else:
            logger.info("%s/%s speculates as the pool file says: %s", backend.model, backend.name, backend.said)
        if (method, schedule) != (backend.method, backend.draft_schedule):
            self._call(self.on_engine_change, backend, EngineChange.SPECULATION)

    def _compare_steps(self, backend: Backend, record: _Record, engine: EngineMetrics, now_s: float) -> None:
        """Compare the tokens per step that the answers of a replica show with those that its engine counts."""
        by_peers, comparison = backend.answered_by_peers, record.comparison
        answered = backend.answered_tokens + by_peers[0], backend.answered_steps + by_peers[1]
        if not comparison.add(engine, answered, _most_per_step(backend), now_s):
            return
        before, backend.difference = backend.difference, comparison.difference
        if backend.difference is not None and before is None:
            text = "%s/%s: %s; what is learned from them is corrected"
            logger.warning(text, backend.model, backend.name, backend.difference)
        elif backend.difference is None and before is not None:
            logger.info("%s/%s: its answers show what its engine counts again", backend.model, backend.name)
        if backend.difference != before:
            self._call(self.on_difference, backend)

    def _return(self, backend: Backend, record: _Record, now_s: float) -> None:
        """Have a replica that passes its probes come back: at once, slowly, or after a request on trial."""
        others = self.up(backend.model)
        was_ejected = backend.state is State.EJECTED
        if was_ejected and others and now_s < record.ejected_until_s:
            return
        on_trial = was_ejected or record.has_stalled  # which its probes do not show
        settled_s = now_s - self.rules.slow_start_s
        is_slow = self.rules.slow_start_s > 0 and any(
            self._records[other.model, other.name].up_since_s <= settled_s for other in others
        )
        if others and (on_trial or is_slow):
            self.recovery.enter(backend, on_trial=on_trial, now_s=now_s)
            self._set(backend, State.RECOVERING, self.recovery.describe(backend))
        else:
            self._set(backend, State.UP, "")

    def _advance(self, backend: Backend, now_s: float, *, served: bool = False) -> None:
        if self.recovery.advance(backend, now_s, served=served):
            self._set(backend, State.UP, "")
        else:
            self._set(backend, State.RECOVERING, self.recovery.describe(backend))

    def _note_unreachable(self, backend: Backend, problem: str) -> None:
        if not backend.launched and backend.state_reason != problem:
            logger.warning("%s/%s cannot be reached yet: %s", backend.model, backend.name, problem)
            backend.state_reason = problem

    def _is_stalled(self, backend: Backend, record: _Record, now_s: float) -> bool:
        engine = record.engine
        if engine is None:
            return False
        # The counters of tokens stand still while a long prompt is computed in parts; its part of the KV cache grows.
        progress = (engine.prompt_tokens, engine.generation_tokens, engine.kv_usage)
        if progress != record.progress or engine.running + engine.waiting == 0:
            record.progress, record.progress_at_s = progress, now_s
        return now_s - record.progress_at_s > self.rules.stall_s

    def _ejection_s(self, record: _Record) -> float:
        is_relapse = time.monotonic() - record.ejected_until_s <= self.rules.eject_max_s
        return min(2.0 * record.ejection_s if is_relapse else self.rules.eject_s, self.rules.eject_max_s)

    def _set(self, backend: Backend, state: State, reason: str) -> None:
        record = self._records[backend.model, backend.name]
        if record.drained and state is not State.DRAINING:
            return
        before = backend.state
        if state is not before:
            level = logging.WARNING if state in {State.DOWN, State.EJECTED} else logging.INFO
            logger.log(level, "%s/%s is %s%s", backend.model, backend.name, state, f": {reason}" if reason else "")
            record.strikes.clear()
            record.up_since_s = time.monotonic() if state is State.UP else math.inf
            record.has_stalled = record.has_stalled and state is not State.UP
        if state is not State.RECOVERING:
            self.recovery.leave(backend)
        backend.state = state
        backend.state_reason = reason
        if before is State.UP and state is not before and not self.up(backend.model):
            for other in self.of(backend.model):  # a replica that is not proven is better than none
                if other.state is State.EJECTED:
                    self._records[other.model, other.name].wake.set()
                elif other.state is State.RECOVERING:
                    self._set(other, State.UP, "")
        if state is State.DOWN and before is not State.DOWN:
            self._call(self.on_down, backend)
        if state in _SERVING:
            self._call(self.on_ready, backend)

    @staticmethod
    def _call(callback: Callable[[Backend, *Told], None] | None, backend: Backend, *told: *Told) -> None:
        """Report to who wants to know; what that raises changes nothing here."""
        if callback is not None:
            with background.guarded("probes", of=f"{backend.model}/{backend.name}"):
                callback(backend, *told)


def _most_per_step(backend: Backend) -> int:
    return 1 + backend.draft_schedule.k
