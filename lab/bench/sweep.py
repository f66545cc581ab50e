"""A benchmark: every target in turn, under every load at every temperature, and their comparison.

A cell is a combination of model, temperature and load; runs of one cell are compared.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from backends import background
from backends.launch.supervisor import LaunchError
from backends.validation import UsageError
from lab.bench.arrivals import Arrival
from lab.bench.preflight import Preflight, TargetInfo
from lab.bench.prompts import Prompt, RequestFormat
from lab.bench.record import Record
from lab.bench.report.results import Run, Speedup
from lab.bench.report.statistics import compare
from lab.bench.run import MeasuredRun, Measurement
from lab.bench.settings import BenchSettings
from lab.bench.targets import BaseUrl, Target, running_target
from lab.bench.workload import Load, Workload, mean_rate


class Watcher(Protocol):
    """Receives the progress of a benchmark."""

    def say(self, text: str) -> None:
        """Show a message about the current activity."""

    def begin(self, target: Target, load: Load, temperature: float | None, size: int | None) -> None:
        """Handle the beginning of a run of `size` requests (None: limited only by time)."""

    def advance(self, record: Record) -> None:
        """Handle the end of a request."""

    def end(self, run: Run) -> None:
        """Handle the end of a run."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Prompts and arrivals read from files."""

    prompts: Sequence[Prompt] | None = None  # prompts of a dataset; None for synthetic prompts
    trace: Sequence[Arrival] | None = None  # arrivals of a trace; None without one


@dataclass(frozen=True, slots=True)
class Outcome:
    """The runs of a benchmark, and the reasons why targets were not measured."""

    runs: tuple[Run, ...]
    not_measured: dict[str, str]
    interrupted: bool


class Sweep:
    """Measures targets one after another, so that they do not compete for the machine."""

    def __init__(
        self, settings: BenchSettings, targets: Sequence[Target], inputs: Inputs, run_dir: Path, watcher: Watcher
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._inputs = inputs
        self._run_dir = run_dir
        self._watcher = watcher
        self._scales: dict[str, TargetInfo] = {}
        self._measurement: Measurement | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._stopped = False
        self._measured: list[MeasuredRun] = []
        self._not_measured: dict[str, str] = {}

    def stop(self) -> None:
        """End the benchmark now; what has been measured is kept."""
        self._stopped = True
        if self._measurement is not None:
            self._measurement.stop()
        elif self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> Outcome:
        """Measure all targets; one that cannot be measured is reported and skipped."""
        for index, target in enumerate(self._targets):
            if self._stopped:
                break
            run_dir = self._run_dir / str(index)
            run_dir.mkdir()
            self._waiting = background.start("lab", self._target(target, run_dir), raises=Exception)
            try:
                await self._waiting
            except (UsageError, LaunchError) as error:
                self._not_measured[target.name] = str(error)
                self._watcher.say(f"{target.name}: {error}")
            except asyncio.CancelledError:
                if not self._stopped:
                    raise
        return Outcome(with_speedups(self._measured, self._settings), self._not_measured, self._stopped)

    async def _target(self, target: Target, run_dir: Path) -> None:
        headers = list(self._settings.request_headers)
        if target.api_key is not None:
            headers.append(("authorization", f"Bearer {target.api_key}"))
        async with running_target(target, run_dir, self._watcher.say) as running:
            preflight = Preflight(target, running.base, headers)
            try:
                self._watcher.say(f"checking {target.name}")
                info = await preflight.inspect(self._settings.endpoint, self._settings.seed)
                for cell, (temperature, load) in enumerate(cells(self._settings, self._inputs.trace)):
                    if not self._stopped:
                        await running.ready()
                        await self._cell(target, running.base, headers, preflight, info, cell, temperature, load)
            finally:
                await preflight.close()

    async def _cell(
        self,
        target: Target,
        base: BaseUrl,
        headers: list[tuple[str, str]],
        preflight: Preflight,
        info: TargetInfo,
        cell: int,
        temperature: float | None,
        load: Load,
    ) -> None:
        scale = self._scales.setdefault(info.model, info).scale  # the first target's, so that all get the same prompts
        workload = Workload(
            self._settings,
            load,
            cell,
            scale=scale,
            prompts=self._inputs.prompts,
            trace=self._inputs.trace,
            context_tokens=info.context_tokens,
        )
        form = RequestFormat(self._settings.endpoint, info.model, temperature, self._settings.ignore_eos)
        self._watcher.begin(target, load, temperature, workload.size)
        self._measurement = Measurement(self._settings, target, base, form, headers, self._watcher.advance)
        try:
            measured = await self._measurement.measure(workload, load, preflight)
        finally:
            self._measurement.close()
            self._measurement = None
        if measured.run.completed or measured.run.failed:
            self._measured.append(measured)
            self._watcher.end(measured.run)


def cells(settings: BenchSettings, trace: Sequence[Arrival] | None) -> list[tuple[float | None, Load]]:
    """Return the combinations of temperature and load, in the order in which they are measured."""
    if settings.concurrency:
        loads = [Load("concurrency", count) for count in settings.concurrency]
    elif trace is not None:
        loads = [Load("trace", rate) for rate in settings.rate or (mean_rate(trace),)]
    else:
        loads = [Load("rate", rate) for rate in settings.rate]
    return list(itertools.product(settings.temperature or (None,), loads))


def with_speedups(measured: Sequence[MeasuredRun], settings: BenchSettings) -> tuple[Run, ...]:
    """Return the runs with their speedups over the baseline's run under the same load at the same temperature."""
    runs = []
    for own in measured:
        base = next((other for other in measured if _is_baseline(other, own, settings.baseline)), None)
        if base is None or base is own or own.sample is None or base.sample is None:
            runs.append(own.run)
            continue
        throughput, tpot = compare(own.sample, base.sample)
        runs.append(replace(own.run, speedup=Speedup(base.run.target, throughput, tpot)))
    return tuple(runs)


def _is_baseline(other: MeasuredRun, own: MeasuredRun, name: str | None) -> bool:
    if name is not None:  # named by the user, so its model may have another name
        return other.run.target == name and other.run.cell[1:] == own.run.cell[1:]
    return other.run.method == "baseline" and other.run.cell == own.run.cell
