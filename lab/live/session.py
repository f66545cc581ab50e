"""Live runs: sends a trace to one endpoint after the other."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from backends import background
from backends.validation import UsageError
from lab.live.endpoints import LiveEndpoint
from lab.live.generator import INTERRUPTED, Generator, GeneratorHealth
from lab.live.record import Record
from lab.live.requests import EndpointInfo, LiveRequests, api_of
from lab.replay.figures import figures_of
from lab.simulation.simulate import Replayed
from lab.trace.record import TraceRecord

_TOKEN_TOLERANCE = 0.05
_BUSY_SHARE = 0.8
_LATE_S = 0.010


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """The requests of a run."""

    trace: Sequence[TraceRecord]
    due_s: Sequence[float]  # send times in seconds after the first, ascending
    left_out: int  # number of the trace's requests that generate no text
    at_once: int | None = None  # most in flight, in a closed loop

    @classmethod
    def of(cls, timed: Sequence[tuple[float, TraceRecord]], warmup: int, at_once: int | None = None) -> LiveLoad:
        """Return the load of timed requests; raise if the warm-up leaves none."""
        sent = [(at_s, record) for at_s, record in timed if api_of(record) is not None]
        if not sent:
            raise UsageError("the trace has no requests that generate text")
        if len(sent) <= warmup:
            raise UsageError(f"the trace has {len(sent)} requests; --warmup {warmup} leaves none to count")
        due_s = [at_s - sent[0][0] for at_s, _ in sent]
        return cls([record for _, record in sent], due_s, len(timed) - len(sent), at_once)

    @property
    def apis(self) -> set[str]:
        """The APIs that the requests use."""
        return {api for record in self.trace if (api := api_of(record)) is not None}


@dataclass(frozen=True, slots=True)
class LiveOutcome:
    """The result of one run."""

    endpoint: LiveEndpoint
    model: str
    trace: Sequence[TraceRecord]
    records: Sequence[Record]  # of the requests sent
    health: GeneratorHealth
    warmup: int  # number of first requests that do not count

    @property
    def counted(self) -> list[Record]:
        """The records after the warm-up."""
        return [record for record in self.records if record.index >= self.warmup]

    @property
    def done(self) -> list[Record]:
        """The records of answered requests after the warm-up, in order of the trace."""
        done = [record for record in self.counted if record.error is None]
        return sorted(done, key=lambda record: record.index)

    @property
    def failures(self) -> dict[str, tuple[int, str]]:
        """Number of failed requests by kind, and the message of the first; excludes requests of a stopped run."""
        failed = [record for record in self.counted if record.error not in {None, INTERRUPTED}]
        counts = Counter(record.error or "" for record in failed)
        examples = {record.error: record.detail for record in reversed(failed)}
        return {kind: (count, examples[kind]) for kind, count in counts.most_common()}

    def replayed(self) -> tuple[Replayed, list[str]]:
        """Return the result of the requests after the warm-up, and the names of its backends.

        The names are empty if the answers do not name their backend.
        """
        done = self.done
        named = any(record.backend for record in done)
        names = sorted({record.backend or "unknown" for record in done}) if named else []
        indices = {name: index for index, name in enumerate(names)}
        sent_s = np.array([record.sent_s for record in done])
        e2e_s = np.array([record.e2e_s for record in done])
        return Replayed(
            number=np.array([record.index for record in done], np.int64),
            arrived_s=sent_s - min((record.sent_s for record in self.records), default=0.0),
            e2e_s=e2e_s,
            ttft_s=np.array([record.ttft_s for record in done]),
            tpot_s=np.array([np.nan if record.tpot_s is None else record.tpot_s for record in done]),
            output_tokens=np.array([record.output_tokens for record in done], np.int64),
            backend=np.array([indices[record.backend or "unknown"] for record in done] if named else [], np.int64),
            errors=sum(count for count, _ in self.failures.values()),
            duration_s=float((sent_s + e2e_s).max() - sent_s.min()) if done else 0.0,
        ), names

    def figures(self, slo: Mapping[str, float]) -> dict[str, Any]:
        """Return the figures as for a simulated replay, with `failures` by kind and `notes`."""
        failures = {kind: count for kind, (count, _) in self.failures.items()}
        return figures_of(*self.replayed(), slo) | {"failures": failures, "notes": self.notes()}

    def remarks(self) -> list[str]:
        """Return the failures and the notes."""
        failures = self.failures.items()
        return [f"{count:,} failed, {kind}: {why}".rstrip(": ") for kind, (count, why) in failures] + self.notes()

    def notes(self) -> list[str]:
        """Return notes on the figures, such as reasons to doubt them."""
        done, notes = self.done, []
        with_usage = [record for record in done if record.usage is not None and record.usage.prompt_tokens is not None]
        traced = sum(self.trace[record.index].prompt_tokens for record in with_usage)
        prompt_tokens = sum((record.usage and record.usage.prompt_tokens) or 0 for record in with_usage)
        if traced and abs(prompt_tokens / traced - 1.0) > _TOKEN_TOLERANCE:
            notes.append(f"Prompts had {prompt_tokens / traced:.0%} of the trace's tokens.")
        known = [record for record in done if self.trace[record.index].output_tokens]
        traced = sum(self.trace[record.index].output_tokens or 0 for record in known)
        output_tokens = sum(record.output_tokens for record in known)
        if traced and abs(output_tokens / traced - 1.0) > _TOKEN_TOLERANCE:
            hint = "" if output_tokens > traced else ": the engine ended them; --ignore-eos prevents that on vLLM"
            notes.append(f"Answers had {output_tokens / traced:.0%} of the trace's tokens{hint}.")
        cached = sum((record.usage and record.usage.cached_tokens) or 0 for record in with_usage)
        if cached:
            notes.append(f"{cached / prompt_tokens:.0%} of the prompt tokens were found in a prefix cache.")
        if any(record.usage is None or record.usage.output_tokens is None for record in done):
            notes.append("Answers had no usage: a chunk counts as one token, so speculation does not show in TPOT.")
        health = self.health
        if health.cpu_share > _BUSY_SHARE:
            notes.append(f"The load generator used {health.cpu_share:.0%} of a core: it may have been the bottleneck.")
        if health.late_s > _LATE_S:
            notes.append(
                f"The load generator sent requests up to {health.late_s * 1000:.0f} ms late (99th percentile)."
            )
        return notes


class Session:
    """Sends loads to one endpoint at a time, so that they do not compete for the machine, until stopped."""

    def __init__(self, *, warmup: int, timeout_s: float, ignore_eos: bool) -> None:
        self._warmup, self._timeout_s, self._ignore_eos = warmup, timeout_s, ignore_eos
        self.stopped = False  # whether Ctrl-C or SIGTERM ended it early
        self._console = Console(stderr=True, highlight=False)
        self._sending: Generator | None = None
        self._work: asyncio.Task[None] | None = None

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that calls `send`; Ctrl-C and SIGTERM end the run in progress, or cancel the work without one."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        self._work = background.start("lab", work, raises=Exception)
        try:
            await self._work
        except asyncio.CancelledError:
            if not self.stopped:
                raise

    async def send(self, endpoint: LiveEndpoint, info: EndpointInfo, load: LiveLoad, seed: str) -> LiveOutcome:
        """Send a load to an endpoint; generated texts depend on the seed."""
        requests = LiveRequests(load.trace, info, prefix=endpoint.prefix, seed=seed, ignore_eos=self._ignore_eos)
        pace = f"within {load.due_s[-1]:,.1f} s" if load.at_once is None else f"{load.at_once} at once"
        self._console.print(f"sending {len(load.trace):,} requests {pace} to {endpoint.name}", markup=False)
        generator = Generator(
            endpoint.address,
            requests,
            load.due_s,
            endpoint.headers,
            timeout_s=self._timeout_s,
            at_once=load.at_once,
        )
        self._sending = generator
        try:
            health = await generator.run()
        finally:
            self._sending = None
        return LiveOutcome(endpoint, info.model, load.trace, generator.records, health, self._warmup)

    def _stop(self) -> None:
        self.stopped = True
        if self._sending is not None:
            self._sending.stop()
        elif self._work is not None:
            self._work.cancel()
