"""The watch over one replica: its probes, and what they learn from its engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from backends import background
from backends.backend import Backend, EngineChange, EngineLoad
from backends.contradictions import compare
from backends.engine import SEVERAL
from backends.engine_metrics import EngineMetrics
from backends.health import SERVING, HealthRules, State
from backends.probe import Probe, ProbeResult

logger = logging.getLogger(__name__)

_PROBES_WHILE_LATE: Final = 5
_LATE_SHARE: Final = 0.1
"""Lateness of the event loop, as a share of a probe's time-out, from which a time-out says nothing of the replica."""
_TICK_S: Final = 0.05
_STARTING_PAUSE_S: Final = 0.25
"""Pause between probes of a replica that has not started yet; the gateway's start waits for it."""
_late: Final = background.Seldom()


class Watch:
    """What is known about one replica."""

    def __init__(self, backend: Backend, probe: Probe, rules: HealthRules) -> None:
        self.backend = backend
        self.probe = probe
        self.rules = rules
        self.serves: tuple[str, ...] = ()  # what it serves instead of its model, as last probed
        self.wake = asyncio.Event()  # set it to probe now
        self.probed = asyncio.Event()  # set after the first probe
        self.has_left = False  # left the pool, though requests to it may be in flight
        self.task: asyncio.Task[None] | None = None
        self.are_several = False  # whether several engines answer at its address
        # Start time of the engine that the gateway is ending to start one that speculates as configured; None for none.
        self.ending_started_s: float | None = None
        self._peers_in_flight = 0  # requests that other gateway processes have in flight to it
        # Tokens so far of peers' answers with known steps, and those steps.
        self._answered_by_peers = 0.0, 0.0
        self._foreign = 0  # requests in the engine that no known gateway process sent

    @property
    def label(self) -> str:
        """The replica's name for people."""
        return f"{self.backend.model}/{self.backend.name}"

    @property
    def is_at_work(self) -> bool:
        """Whether the replica's metrics report requests."""
        metrics = self.backend.engine.metrics
        return metrics is not None and metrics.running + metrics.waiting > 0

    @property
    def is_progressing(self) -> bool:
        """Whether the replica has requests and its metrics have changed recently."""
        late_s = 2.0 * (self.rules.interval_s + self.rules.timeout_s)
        return self.is_at_work and time.monotonic() - self.backend.health.progress_at_s <= late_s

    def tokens_per_step(self) -> dict[str, float] | None:
        """Return recent tokens per step, as its answers show them and as counted; None if not compared."""
        return self.backend.engine.comparison.figures(self._most_per_step())

    def hear_peers(self, in_flight: int, answered: tuple[float, float], *, recounted: int = 0) -> None:
        """Set the requests that other gateway processes have in flight to it, and its answers to them."""
        backend, self._answered_by_peers = self.backend, answered
        self._peers_in_flight = in_flight
        self._foreign = max(0, self._foreign - recounted)
        # For an engine that reports nothing, count what the gateways sent.
        load, now_s, is_told = backend.load, time.monotonic(), backend.engine.metrics is None
        if is_told and in_flight:
            self._foreign = 0
        others = self._foreign + in_flight
        if others != load.others or (is_told and in_flight):
            if is_told:
                load = replace(load, running=backend.in_flight + others, waiting=0, at_s=now_s)
            backend.load = replace(load, others=others)

    async def run(self, judge: Callable[[Watch, ProbeResult], None]) -> None:
        """Probe the replica repeatedly, and pass each result to `judge`."""
        while True:
            self.wake.clear()
            judge(self, await self.probe_now(admit=self.backend.health.state not in SERVING))
            self.probed.set()
            pause_s = self.rules.interval_s
            if self.backend.health.state is State.STARTING:
                pause_s = min(pause_s, _STARTING_PAUSE_S)
            elif self.backend.health.state is State.EJECTED:
                pause_s = min(pause_s, max(0.05, self.backend.health.ejected_until_s - time.monotonic()))
            try:
                async with asyncio.timeout(pause_s):
                    await self.wake.wait()
                await asyncio.sleep(min(0.1, self.rules.interval_s))  # reports come in bursts: one probe for all
            except TimeoutError:
                pass

    async def probe_now(self, *, admit: bool) -> ProbeResult:
        """Probe the replica; never raise, as without further probes the replica could never return.

        If a probe times out while this process is late itself, repeat it before blaming the replica.
        """
        for _ in range(_PROBES_WHILE_LATE):
            result, late_s = await self._probe_timed(admit=admit)
            if not result.late or late_s < _LATE_SHARE * self.rules.timeout_s:
                break
            if _late.may_say():
                text = "this process was late by %.1f s: probes that timed out are repeated (logged once a minute)"
                logger.warning(text, late_s)
        return result

    async def _probe_timed(self, *, admit: bool) -> tuple[ProbeResult, float]:
        """Return the result of a probe, and the event loop's largest lateness meanwhile, in seconds."""
        probing, late_s = background.start("probes", self._probe_once(admit=admit), of=self.label), 0.0
        try:
            while not probing.done():
                due_s = time.monotonic() + _TICK_S
                await asyncio.wait((probing,), timeout=_TICK_S)
                late_s = max(late_s, time.monotonic() - due_s)
            return await probing, late_s
        finally:
            probing.cancel()

    async def _probe_once(self, *, admit: bool) -> ProbeResult:
        try:
            async with asyncio.timeout(5.0 * self.rules.timeout_s):
                return await self.probe.run(admit=admit, prove=self.backend.health.has_stalled)
        except Exception as error:  # noqa: BLE001 -- such as an OSError that httpx does not wrap
            logger.warning("%s: a probe failed: %s", self.label, type(error).__name__)
            return ProbeResult(f"cannot be probed ({type(error).__name__})", late=isinstance(error, TimeoutError))

    def take(self, result: ProbeResult, now_s: float) -> list[EngineChange]:
        """Store what an engine reports about itself; return its changes since the last time."""
        backend, before, page = self.backend, self.backend.engine, result.engine
        if result.said is None:
            return []
        how, difference = (backend.method, backend.draft_schedule), backend.difference
        backend.set_engine(result.said, is_new=result.is_new)
        if self.probe.processes.are_several != self.are_several:
            self.are_several = not self.are_several
            if self.are_several:
                logger.warning("%s: %s", self.label, SEVERAL)
            else:
                logger.info("%s: one engine answers at its address now", self.label)
        changes = []
        if result.is_new and before.said.card is not None:
            changes.append(EngineChange.RESTART)
        elif page is not None and before.metrics is not None and not self.are_several:
            changes += _changes(before.metrics, page)
        for change in changes:
            logger.info("%s: its engine has changed %s", self.label, change.replace("_", " "))
        backend.engine.metrics = page
        if page is not None:
            self._read(page, now_s)
        if (backend.method, backend.draft_schedule) != how:
            changes.append(EngineChange.SPECULATION)
        if backend.difference is not None and difference is None:
            logger.warning("%s: %s; what is learned from them is corrected", self.label, backend.difference)
        elif backend.difference is None and difference is not None:
            logger.info("%s: its answers show what its engine counts again", self.label)
        return changes

    def _read(self, page: EngineMetrics, now_s: float) -> None:
        """Compare an engine's counters with the pool file and with its answers, and store its load."""
        backend, engine = self.backend, self.backend.engine
        if compare(backend, page):
            if engine.contradictions:
                logger.warning("%s: %s", self.label, backend.contradiction)
            else:
                logger.info("%s speculates as the pool file says: %s", self.label, backend.declared)
        by_peers, most_per_step = self._answered_by_peers, self._most_per_step()
        answered = backend.answered_tokens + by_peers[0], backend.answered_steps + by_peers[1]
        engine.comparison.add(page, answered, most_per_step, now_s)
        engine.acceptance.add(page, now_s)
        engine.occupancy.add(page)
        others = max(self._peers_in_flight, page.running + page.waiting - backend.in_flight)
        self._foreign = others - self._peers_in_flight
        backend.load = EngineLoad(
            page.running,
            page.waiting,
            page.kv_usage,
            others,
            at_s=now_s,
            kv_tokens=page.kv_tokens,
            tokens_per_step=min(page.generation_tokens / page.steps, most_per_step) if page.steps else 0.0,
            drafts=page.drafts,
            accepted_tokens=page.accepted_tokens,
        )

    def _most_per_step(self) -> int:
        """Return the most tokens that a step can give, with all drafts accepted."""
        return 1 + self.backend.draft_schedule.k

    def start(self, judge: Callable[[Watch, ProbeResult], None]) -> None:
        """Start probing."""
        self.task = background.keep_running("probes", lambda: self.run(judge), of=self.label)


def _changes(before: EngineMetrics, now: EngineMetrics) -> list[EngineChange]:
    """Return an engine's changes between two readings of its metrics."""
    if now.reloads > before.reloads:
        return [EngineChange.RELOAD]
    was_woken = now.wake_ups > before.wake_ups or (before.awake == 0 and now.awake)
    return [EngineChange.WAKE_UP] if was_woken else []
