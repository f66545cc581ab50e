"""One run: a target under one load at one temperature, from warm-up to figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.engine_metrics import EngineMetrics
from backends.http.client import UpstreamClient
from lab.bench.generator import Generator, Health, HttpSender
from lab.bench.preflight import Preflight
from lab.bench.prompts import RequestFormat
from lab.bench.record import Record
from lab.bench.report import statistics
from lab.bench.report.results import GeneratorFigures, Run
from lab.bench.report.statistics import Sample
from lab.bench.settings import BenchSettings
from lab.bench.targets import BaseUrl, Target
from lab.bench.workload import Load, Workload

CONNECT_S = 10.0
_WARMUP_CONCURRENCY = 8
_BUSY_SHARE = 0.8
_LATE_S = 0.010


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The figures of a run, and the sample of its requests for comparison with other runs."""

    run: Run
    sample: Sample | None


class Measurement:
    """Measures one target under one load."""

    def __init__(
        self,
        settings: BenchSettings,
        target: Target,
        base: BaseUrl,
        form: RequestFormat,
        headers: list[tuple[str, str]],
        on_progress: Callable[[Record], None],
    ) -> None:
        self._settings = settings
        self._target = target
        self._form = form
        self._client = UpstreamClient(base.address, connect_timeout_s=CONNECT_S, max_idle=100_000)
        self._sender = HttpSender(self._client, base.prefix + form.path, headers, settings.timeout_s)
        self._on_progress = on_progress  # called with each request that ends, except during warm-up
        self._generator: Generator | None = None
        self._stopped = False

    def stop(self) -> None:
        """End the run now; finished requests are kept."""
        self._stopped = True
        if self._generator is not None:
            self._generator.stop()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    async def measure(self, workload: Workload, load: Load, preflight: Preflight) -> MeasuredRun:
        """Warm up, run, and compute the figures."""
        settings = self._settings
        if settings.warmup:
            self._generator = Generator(self._sender, lambda index: self._form.body(workload.prompt(-1 - index)))
            await self._generator.closed_loop(min(settings.warmup, _WARMUP_CONCURRENCY), settings.warmup, None)
        before = await preflight.counters()
        self._generator = Generator(
            self._sender, lambda index: self._form.body(workload.prompt(index)), self._on_progress
        )
        if self._stopped:
            health = Health(0.0, [], [])
        elif workload.arrivals_s is not None:
            health = await self._generator.open_loop(workload.arrivals_s)
        else:
            health = await self._generator.closed_loop(int(load.value), settings.count, settings.duration_s)
        after = await preflight.counters()
        return self._figures(self._generator, health, load, workload, before, after)

    def _figures(
        self,
        generator: Generator,
        health: Health,
        load: Load,
        workload: Workload,
        before: EngineMetrics | None,
        after: EngineMetrics | None,
    ) -> MeasuredRun:
        records = generator.records
        done = [record for record in records if record.error is None]
        failed = [record for record in records if record.error not in {None, "interrupted"}]
        end_s = max((record.ended_s for record in records), default=generator.start_s)
        duration_s = max(end_s - generator.start_s, 1e-9)
        output_tokens = sum(record.output_tokens for record in done)
        input_tokens = sum((record.usage and record.usage.prompt_tokens) or 0 for record in done)
        cached = [record.usage.cached_tokens for record in done if record.usage is not None]
        tpot_s = [record.tpot_s for record in done if record.tpot_s is not None]
        run = Run(
            target=self._target.name,
            model=self._form.model,
            method=self._target.method.value if self._target.method is not None else None,
            k=self._target.k,
            simulated=self._target.simulated,
            temperature=self._form.temperature,
            load=load,
            completed=len(done),
            failed=len(failed),
            failures=statistics.failures(failed),
            interrupted=self._stopped,
            duration_s=duration_s,
            input_tokens=input_tokens,
            cached_tokens=sum(count for count in cached if count) if any(c is not None for c in cached) else None,
            output_tokens=output_tokens,
            requests_per_s=len(done) / duration_s,
            output_tokens_per_s=output_tokens / duration_s,
            total_tokens_per_s=(input_tokens + output_tokens) / duration_s,
            ttft=statistics.distribution([record.ttft_s for record in done]),
            itl=statistics.distribution(statistics.inter_token_s(done)),
            tpot=statistics.distribution(tpot_s),
            e2e=statistics.distribution([record.e2e_s for record in done]),
            acceptance=statistics.acceptance(done, before, after),
            tokens_per_chunk=statistics.tokens_per_chunk(done),
            tokens_counted_by="usage" if statistics.has_usage(done) else "chunks",
            generator=_generator_figures(health),
            notes=tuple(_notes(generator, done, health, workload)),
            timeline=statistics.timeline(done, generator.start_s, end_s),
        )
        closed = load.kind == "concurrency"
        return MeasuredRun(run, Sample.of(done, run.output_tokens_per_s, closed=closed) if output_tokens else None)


def _generator_figures(health: Health) -> GeneratorFigures:
    return GeneratorFigures(
        health.cpu_share,
        _percentile_ms(health.late_s, 50),
        _percentile_ms(health.late_s, 99),
        _percentile_ms(health.stall_s, 99),
    )


def _percentile_ms(seconds: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(seconds, percent) * 1000.0) if seconds else None


def _notes(generator: Generator, done: Sequence[Record], health: Health, workload: Workload) -> list[str]:
    notes = ["Stopped after a hundred consecutive failures."] if generator.gave_up else []
    if workload.left_out:
        notes.append(f"{workload.left_out} requests of the trace are left out: longer than the engine's context.")
    if workload.repeats:
        notes.append("The dataset has fewer prompts than were sent; repeated prompts favor prefix and suffix caches.")
    return notes + caveats(done, health)


def caveats(done: Sequence[Record], health: Health) -> list[str]:
    """Return reasons to doubt the figures: missing usage, or an overloaded generator."""
    notes = []
    if done and not statistics.has_usage(done):
        notes.append("Answers had no usage: a chunk counts as one token, so speculation does not show in TPOT.")
    if health.cpu_share > _BUSY_SHARE:
        notes.append(f"The load generator used {health.cpu_share:.0%} of a core: it may have been the bottleneck.")
    late_s = float(np.percentile(health.late_s, 99)) if health.late_s else 0.0
    stall_s = float(np.percentile(health.stall_s, 99)) if health.stall_s else 0.0
    if max(late_s, stall_s) > _LATE_S:
        activity = "sent requests" if late_s > stall_s else "recorded chunks"
        notes.append(
            f"The load generator {activity} up to {max(late_s, stall_s) * 1000:.0f} ms late (99th percentile)."
        )
    return notes
