"""A live replay under way: one endpoint after the other, and what came of each."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from rich.console import Console

from backends.validation import UsageError
from lab.bench.generator import Health
from lab.bench.record import Record
from lab.bench.report.progress import RequestBar
from lab.bench.run import doubts
from lab.live.endpoints import LiveEndpoint, Seen, look
from lab.live.requests import LiveRequests, api_of
from lab.live.run import LiveRun, failed, replayed
from lab.replay.figures import figures_of
from lab.trace import TraceRecord

_ALIKE = 0.05


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What was asked for on the command line; see `gateway replay --help`."""

    trace: tuple[Path, ...]
    urls: tuple[str, ...]
    policies: tuple[str, ...] = ()
    model: str | None = None
    rate: float | None = None
    speed: float = 1.0
    limit: int | None = None
    warmup: int = 0
    seed: int | None = None
    slo: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    ignore_eos: bool = False
    trace_format: str | None = None
    strict: bool = False
    json_file: Path | None = None
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run."""

    endpoint: LiveEndpoint
    model: str
    trace: Sequence[TraceRecord]
    records: Sequence[Record]
    health: Health

    def figures(self, warmup: int, slo: Mapping[str, float]) -> dict[str, Any]:
        """Return what `--json` has of it, as of a simulated replay, and `failures` by kind and `notes`."""
        result, backends = replayed(self.records, warmup)
        counted = [record for record in self.records if record.index >= warmup]
        kinds = Counter(record.error for record in counted if failed(record))
        return figures_of(result, backends, slo, None) | {"failures": dict(kinds), "notes": self.notes(counted)}

    def notes(self, counted: Sequence[Record]) -> list[str]:
        """Return what must be known to read the figures."""
        done = [record for record in counted if record.error is None]
        notes = []
        told = [one for one in done if one.usage is not None and one.usage.prompt_tokens is not None]
        wanted = sum(self.trace[one.index].prompt_tokens for one in told)
        prompt_tokens = sum((one.usage and one.usage.prompt_tokens) or 0 for one in told)
        if wanted and abs(prompt_tokens / wanted - 1.0) > _ALIKE:
            notes.append(f"Prompts had {prompt_tokens / wanted:.0%} of the trace's tokens.")
        known = [one for one in done if self.trace[one.index].output_tokens]
        wanted = sum(self.trace[one.index].output_tokens or 0 for one in known)
        output_tokens = sum(one.output_tokens for one in known)
        if wanted and abs(output_tokens / wanted - 1.0) > _ALIKE:
            hint = (
                ""
                if output_tokens > wanted
                else ": the engine ended them itself; --ignore-eos, on vLLM, does not let it"
            )
            notes.append(f"Answers had {output_tokens / wanted:.0%} of the trace's tokens{hint}.")
        cached = sum((one.usage and one.usage.cached_tokens) or 0 for one in told)
        if cached:
            notes.append(f"Of the prompts, {cached / prompt_tokens:.0%} was found in a prefix cache.")
        return notes + doubts(done, self.health)


class Session:
    """Sends a trace to one endpoint after the other, so that they do not take each other's time.

    Attributes
    ----------
    size
        Requests that are sent to each, the warm-up included.
    left_out
        Those of the trace that generate no text.
    stopped
        Whether it was ended early, by Ctrl-C or SIGTERM.

    Raises
    ------
    UsageError
        If nothing is left to count.
    """

    def __init__(
        self, options: LiveOptions, endpoints: Sequence[LiveEndpoint], timed: Sequence[tuple[float, TraceRecord]]
    ) -> None:
        self._options = options
        self._endpoints = endpoints
        sent = [(at_s, record) for at_s, record in timed if api_of(record) is not None]
        self.left_out = len(timed) - len(sent)
        if not sent:
            raise UsageError("the trace has no requests that generate text")
        if len(sent) <= options.warmup:
            raise UsageError(f"the trace has {len(sent)} requests; --warmup {options.warmup} leaves none to count")
        self._due_s = [at_s - sent[0][0] for at_s, _ in sent]
        self._trace = [record for _, record in sent]
        # Texts of an earlier run would be found in prefix caches.
        self._texts_seed = token_hex(8) if options.seed is None else str(options.seed)
        self.size = len(sent)
        self.stopped = False
        self._console = Console(stderr=True, highlight=False)
        self._run: LiveRun | None = None
        self._looking: asyncio.Task[list[Seen]] | None = None

    async def run(self) -> list[Outcome]:
        """Look at all endpoints, then send the trace to each; return what came of it, less what was not begun."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self._looking = asyncio.create_task(self._look())
        try:
            seen = await self._looking
        except asyncio.CancelledError:
            if self.stopped:
                return []
            raise
        outcomes: list[Outcome] = []
        for place, (endpoint, one) in enumerate(zip(self._endpoints, seen, strict=True)):
            if not self.stopped:
                outcomes.append(await self._send(place, endpoint, one))
        return outcomes

    def _stop(self) -> None:
        self.stopped = True
        if self._run is not None:
            self._run.stop()
        elif self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> list[Seen]:
        apis = {api for record in self._trace if (api := api_of(record)) is not None}
        return [await look(endpoint, apis, self._options.seed or 0) for endpoint in self._endpoints]

    async def _send(self, place: int, endpoint: LiveEndpoint, seen: Seen) -> Outcome:
        options = self._options
        requests = LiveRequests(
            self._trace,
            seen.models,
            seen.model,
            seen.scales,
            seed=f"{self._texts_seed}/{place}",
            ignore_eos=options.ignore_eos,
        )
        duration_s = self._due_s[-1]
        self._console.print(
            f"sending {self.size:,} requests within {duration_s:,.1f} s to {endpoint.name}", markup=False
        )
        bar = RequestBar(self._console)
        self._run = LiveRun(endpoint.base, requests, self._due_s, endpoint.headers, options.timeout_s, bar.advance)
        begun_s = time.monotonic()

        def share(ended: int) -> float:
            """Tell by the trace's time, which is known, and not by requests, which may come in bursts."""
            passed = (time.monotonic() - begun_s) / duration_s if duration_s else 1.0
            return min(passed, 0.999) if ended < self.size else 1.0

        bar.start(endpoint.name, self.size, share)
        try:
            health = await self._run.run()
            return Outcome(endpoint, seen.model, self._trace, self._run.records, health)
        finally:
            self._run = None
            bar.stop()
