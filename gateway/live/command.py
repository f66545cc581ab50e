"""`gateway replay --live` from its options to its exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson
import uvloop
from rich.console import Console

from gateway.bench.generator import Health
from gateway.bench.progress import RequestBar
from gateway.bench.record import Record
from gateway.bench.run import doubts
from gateway.bench.settings import BenchError
from gateway.bench.statistics import failures
from gateway.live.endpoints import LiveEndpoint, LiveError, Seen, live_endpoints, look
from gateway.live.requests import LiveRequests, api_of
from gateway.live.run import LiveRun, failed, replayed
from gateway.policy_option import PolicyOptionError
from gateway.replay_figures import figures_console, figures_of, figures_tables
from gateway.replay_pace import paced
from gateway.replay_page import page
from gateway.slo_option import slo_bounds
from policies.trace import BrokenLines, TraceError, TraceRecord, read_trace

_FAILED = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
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


def run_live(options: LiveOptions) -> int:
    """Send a trace to each endpoint as the command line asks for it.

    Returns
    -------
    int
        Exit status: 0, 1 if of one row no request succeeded, 2 if the input is wrong or an endpoint does not answer
        (then the trace was not sent), 130 after Ctrl-C.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        slo = slo_bounds(options.slo)
        endpoints = live_endpoints(options.urls, options.policies, options.model, options.api_key)
        records = read_trace(
            list(options.trace), format=options.trace_format, strict=options.strict, in_order=True, report=broken
        )
        timed = paced(islice(records, options.limit), options.rate, options.speed, options.seed or 0)
        replay = _Live(options, endpoints, timed)
        outcomes = uvloop.run(replay.run())
    except (LiveError, PolicyOptionError, BenchError, TraceError, ValueError, OSError) as error:
        print(f"gateway replay: {error}", file=sys.stderr)
        return _BAD_INPUT
    if not outcomes:
        print("gateway replay: stopped before anything of the trace was sent", file=sys.stderr)
        return _INTERRUPTED
    figures = {one.endpoint.name: one.figures(options.warmup, slo) for one in outcomes}
    document: dict[str, Any] = {
        "trace": [path.name for path in options.trace],
        "model": ", ".join(dict.fromkeys(one.model for one in outcomes)),
        "requests": replay.size - options.warmup,
        "warmup": options.warmup,
        "seed": options.seed or 0,
        "slo": slo,
        "clairvoyant_mean_e2e_s": None,
        "live": {one.name: one.url for one in endpoints},
        "interrupted": replay.stopped,
        "policies": figures,
    }
    _print(document, outcomes, slo, replay.left_out)
    if options.json_file is not None:
        options.json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    if options.report is not None:
        options.report.write_text(page(document), encoding="utf-8")
    if replay.stopped:
        return _INTERRUPTED
    return 0 if all(one["requests"] for one in figures.values()) else _FAILED


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of one run."""

    endpoint: LiveEndpoint
    model: str
    trace: Sequence[TraceRecord]
    records: Sequence[Record]
    health: Health

    def figures(self, warmup: int, slo: dict[str, float]) -> dict[str, Any]:
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


class _Live:
    """A replay under way: one endpoint after the other, so that they do not take each other's time."""

    def __init__(
        self, options: LiveOptions, endpoints: Sequence[LiveEndpoint], timed: Sequence[tuple[float, TraceRecord]]
    ) -> None:
        self._options = options
        self._endpoints = endpoints
        sent = [(at_s, record) for at_s, record in timed if api_of(record) is not None]
        self.left_out = len(timed) - len(sent)
        if not sent:
            raise LiveError("the trace has no requests that generate text")
        if len(sent) <= options.warmup:
            raise LiveError(f"the trace has {len(sent)} requests; --warmup {options.warmup} leaves none to count")
        self._due_s = [at_s - sent[0][0] for at_s, _ in sent]
        self._trace = [record for _, record in sent]
        # Texts of an earlier run would be found in prefix caches.
        self._texts_seed = token_hex(8) if options.seed is None else str(options.seed)
        self.size = len(sent)
        self.stopped = False
        self._console = Console(stderr=True, highlight=False)
        self._run: LiveRun | None = None
        self._looking: asyncio.Task[list[Seen]] | None = None

    async def run(self) -> list[_Outcome]:
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
        outcomes: list[_Outcome] = []
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

    async def _send(self, place: int, endpoint: LiveEndpoint, seen: Seen) -> _Outcome:
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
            return _Outcome(endpoint, seen.model, self._trace, self._run.records, health)
        finally:
            self._run = None
            bar.stop()


def _print(document: dict[str, Any], outcomes: Sequence[_Outcome], slo: dict[str, float], left_out: int) -> None:
    console = figures_console()
    stopped = ", stopped: requests that had not ended are not in it" if document["interrupted"] else ""
    console.print(f"{document['requests']:,} requests for {document['model']}{stopped}", end="\n\n", markup=False)
    for table in figures_tables(document["policies"], slo, "endpoint"):
        console.print(table, "")
    if left_out:
        console.print(f"{left_out:,} requests of the trace generate no text, and are left out.")
    for one in outcomes:
        counted = [record for record in one.records if record.index >= document["warmup"] and failed(record)]
        lines = [f"{kind.count:,} failed, {kind.kind}: {kind.example}".rstrip(": ") for kind in failures(counted)]
        for line in lines + document["policies"][one.endpoint.name]["notes"]:
            console.print(f"{one.endpoint.name}: {line}", markup=False, soft_wrap=True)
