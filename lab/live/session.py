"""A live replay of one endpoint after the other."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from rich.console import Console

from backends import background
from backends.validation import UsageError
from lab.bench.generator import Health
from lab.bench.record import Record
from lab.bench.report.progress import RequestBar
from lab.bench.run import caveats
from lab.live.endpoints import EndpointInfo, LiveEndpoint, inspect_endpoint
from lab.live.requests import LiveRequests, api_of
from lab.live.run import LiveRun, failed, replayed
from lab.replay.figures import figures_of
from lab.replay.options import ReplayOptions
from lab.trace import TraceRecord

_TOKEN_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run."""

    endpoint: LiveEndpoint
    model: str
    trace: Sequence[TraceRecord]
    records: Sequence[Record]
    health: Health

    def figures(self, warmup: int, slo: Mapping[str, float]) -> dict[str, Any]:
        """Return the figures as for a simulated replay, with `failures` by kind and `notes`."""
        result, backends = replayed(self.records, warmup)
        counted = [record for record in self.records if record.index >= warmup]
        kinds = Counter(record.error for record in counted if failed(record))
        return figures_of(result, backends, slo) | {"failures": dict(kinds), "notes": self.notes(counted)}

    def notes(self, counted: Sequence[Record]) -> list[str]:
        """Return notes on the figures."""
        done = [record for record in counted if record.error is None]
        notes = []
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
        return notes + caveats(done, self.health)


class Session:
    """Sends a trace to one endpoint after the other, so that they do not compete for the machine."""

    def __init__(
        self, options: ReplayOptions, endpoints: Sequence[LiveEndpoint], timed: Sequence[tuple[float, TraceRecord]]
    ) -> None:
        self._options = options
        self._endpoints = endpoints
        sent = [(at_s, record) for at_s, record in timed if api_of(record) is not None]
        self.left_out = len(timed) - len(sent)  # number of requests of the trace that generate no text
        if not sent:
            raise UsageError("the trace has no requests that generate text")
        if len(sent) <= options.warmup:
            raise UsageError(f"the trace has {len(sent)} requests; --warmup {options.warmup} leaves none to count")
        self._due_s = [at_s - sent[0][0] for at_s, _ in sent]
        self._trace = [record for _, record in sent]
        # By default texts differ from run to run, so that no prefix cache has them.
        self._texts_seed = token_hex(8) if options.seed is None else str(options.seed)
        self.size = len(sent)  # number of requests sent to each endpoint, including the warm-up
        self.stopped = False  # whether it was ended early by Ctrl-C or SIGTERM
        self._console = Console(stderr=True, highlight=False)
        self._run: LiveRun | None = None
        self._inspecting: asyncio.Task[list[EndpointInfo]] | None = None

    async def run(self) -> list[Outcome]:
        """Inspect all endpoints, then send the trace to each; return the outcomes of the runs that were started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self._inspecting = background.start("lab", self._inspect(), raises=Exception)
        try:
            infos = await self._inspecting
        except asyncio.CancelledError:
            if self.stopped:
                return []
            raise
        outcomes: list[Outcome] = []
        for index, (endpoint, info) in enumerate(zip(self._endpoints, infos, strict=True)):
            if not self.stopped:
                outcomes.append(await self._send(index, endpoint, info))
        return outcomes

    def _stop(self) -> None:
        self.stopped = True
        if self._run is not None:
            self._run.stop()
        elif self._inspecting is not None:
            self._inspecting.cancel()

    async def _inspect(self) -> list[EndpointInfo]:
        apis = {api for record in self._trace if (api := api_of(record)) is not None}
        return [await inspect_endpoint(endpoint, apis, self._options.seed or 0) for endpoint in self._endpoints]

    async def _send(self, index: int, endpoint: LiveEndpoint, info: EndpointInfo) -> Outcome:
        options = self._options
        requests = LiveRequests(
            self._trace,
            info.models,
            info.model,
            info.scales,
            seed=f"{self._texts_seed}/{index}",
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
            """Return the share of the trace's time that has passed, since requests may come in bursts."""
            passed = (time.monotonic() - begun_s) / duration_s if duration_s else 1.0
            return min(passed, 0.999) if ended < self.size else 1.0

        bar.start(endpoint.name, self.size, share)
        try:
            health = await self._run.run()
            return Outcome(endpoint, info.model, self._trace, self._run.records, health)
        finally:
            self._run = None
            bar.stop()
