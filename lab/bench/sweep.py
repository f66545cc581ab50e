"""The whole benchmark: every target in turn, under every load at every temperature, then how they compare."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from backends.launch.supervisor import LaunchError
from backends.validation import UsageError
from lab.bench.arrivals import Arrival
from lab.bench.preflight import Look, Sight
from lab.bench.prompts import Form, Prompt
from lab.bench.record import Record
from lab.bench.report.results import Run, Speedup
from lab.bench.report.statistics import compare
from lab.bench.run import Measured, Measurement
from lab.bench.settings import BenchSettings
from lab.bench.targets import Base, Target, reached
from lab.bench.workload import Load, Workload, mean_rate


class Watcher(Protocol):
    """Who is told how far the benchmark is."""

    def say(self, text: str) -> None:
        """Take what is being done."""

    def begin(self, target: Target, load: Load, temperature: float | None, size: int | None) -> None:
        """Know that a run of `size` requests (None: as many as its time holds) begins."""

    def advance(self, record: Record) -> None:
        """Know that a request has ended."""

    def end(self, run: Run) -> None:
        """Take a run's figures."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was read from files.

    Parameters
    ----------
    prompts
        None for synthetic ones.
    """

    prompts: Sequence[Prompt] | None = None
    trace: Sequence[Arrival] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, and what was not and why."""

    runs: tuple[Run, ...]
    not_measured: dict[str, str]
    interrupted: bool


class Sweep:
    """Measures targets one after another, so that they do not take each other's time."""

    def __init__(
        self, settings: BenchSettings, targets: Sequence[Target], inputs: Inputs, run_dir: Path, watcher: Watcher
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._inputs = inputs
        self._run_dir = run_dir
        self._watcher = watcher
        self._scales: dict[str, Sight] = {}
        self._measurement: Measurement | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._stopped = False
        self._measured: list[Measured] = []
        self._not_measured: dict[str, str] = {}

    def stop(self) -> None:
        """End now; what has been measured is kept."""
        self._stopped = True
        if self._measurement is not None:
            self._measurement.stop()
        elif self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> Outcome:
        """Measure everything. A target that cannot be measured is noted and passed over."""
        for place, target in enumerate(self._targets):
            if self._stopped:
                break
            run_dir = self._run_dirs(place)
            self._waiting = asyncio.create_task(self._target(target, run_dir))
            try:
                await self._waiting
            except (UsageError, LaunchError) as error:
                self._not_measured[target.name] = str(error)
                self._watcher.say(f"{target.name}: {error}")
            except asyncio.CancelledError:
                if not self._stopped:
                    raise
        return Outcome(with_speedups(self._measured, self._settings), self._not_measured, self._stopped)

    def _run_dirs(self, place: int) -> Path:
        run_dir = self._run_dir / str(place)
        run_dir.mkdir()
        return run_dir

    async def _target(self, target: Target, run_dir: Path) -> None:
        headers = list(self._settings.request_headers)
        if target.api_key is not None:
            headers.append(("authorization", f"Bearer {target.api_key}"))
        async with reached(target, run_dir, self._watcher.say) as there:
            look = Look(target, there.base, headers)
            try:
                self._watcher.say(f"looking at {target.name}")
                sight = await look.see(self._settings.endpoint, self._settings.seed)
                for cell, (temperature, load) in enumerate(cells(self._settings, self._inputs.trace)):
                    if not self._stopped:
                        await there.ready()
                        await self._cell(target, there.base, headers, look, sight, cell, temperature, load)
            finally:
                await look.close()

    async def _cell(
        self,
        target: Target,
        base: Base,
        headers: list[tuple[str, str]],
        look: Look,
        sight: Sight,
        cell: int,
        temperature: float | None,
        load: Load,
    ) -> None:
        scale = self._scales.setdefault(sight.model, sight).scale  # the first target's, so that prompts are the same
        workload = Workload(
            self._settings,
            load,
            cell,
            scale=scale,
            prompts=self._inputs.prompts,
            trace=self._inputs.trace,
            context_tokens=sight.context_tokens,
        )
        form = Form(self._settings.endpoint, sight.model, temperature, self._settings.ignore_eos)
        self._watcher.begin(target, load, temperature, workload.size)
        self._measurement = Measurement(self._settings, target, base, form, headers, self._watcher.advance)
        try:
            measured = await self._measurement.measure(workload, load, look)
        finally:
            self._measurement.close()
            self._measurement = None
        if measured.run.completed or measured.run.failed:
            self._measured.append(measured)
            self._watcher.end(measured.run)


def cells(settings: BenchSettings, trace: Sequence[Arrival] | None) -> list[tuple[float | None, Load]]:
    """Return the combinations of temperature and load, in the order in which each target goes through them."""
    if settings.concurrency:
        loads = [Load("concurrency", count) for count in settings.concurrency]
    elif trace is not None:
        loads = [Load("trace", rate) for rate in settings.rate or (mean_rate(trace),)]
    else:
        loads = [Load("rate", rate) for rate in settings.rate]
    return list(itertools.product(settings.temperature or (None,), loads))


def with_speedups(measured: Sequence[Measured], settings: BenchSettings) -> tuple[Run, ...]:
    """Compare every run with the baseline's under the same load at the same temperature."""
    runs = []
    for one in measured:
        base = next((other for other in measured if _is_baseline(other, one, settings.baseline)), None)
        if base is None or base is one or one.sample is None or base.sample is None:
            runs.append(one.run)
            continue
        throughput, tpot = compare(one.sample, base.sample, settings.seed)
        runs.append(replace(one.run, speedup=Speedup(base.run.target, throughput, tpot)))
    return tuple(runs)


def _is_baseline(other: Measured, one: Measured, name: str | None) -> bool:
    if name is not None:  # as asked, even if the models are called differently
        return other.run.target == name and other.run.cell[1:] == one.run.cell[1:]
    return other.run.method == "baseline" and other.run.cell == one.run.cell
