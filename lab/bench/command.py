"""Implementation of `gateway bench`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Any, TypeVar

import uvloop

from backends.engine_metrics import CountedAcceptance
from backends.launch.supervisor import LaunchError
from backends.validation import UsageError
from lab.bench.options import BenchOptions
from lab.bench.run import Condition, Run
from lab.bench.show import show_runs
from lab.bench.targets import Target, running, targets_of
from lab.live.endpoints import engine_counters, inspect_endpoint
from lab.live.session import LiveLoad, Session
from lab.replay.pace import paced
from lab.report.terminal import write_json
from lab.trace.record import TraceRecord

_Number = TypeVar("_Number", int, float)
_REQUESTS = 100
_LEAST, _TURNS = 24, 6  # requests of a closed loop: at least, and for each at once
_FAILED = 1
_INTERRUPTED = 130


@dataclass(slots=True)
class Sweep:
    """What is measured, and what has been."""

    targets: Sequence[Target]
    loads: Mapping[Condition, LiveLoad]
    runs: list[Run] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)  # reason by target

    async def measure(self, session: Session, seed: int) -> None:
        """Measure all targets under all loads, one after another."""
        for target in self.targets:
            if session.stopped:
                return
            try:
                await self._measure(session, target, seed)
            except (UsageError, LaunchError) as error:
                self.not_measured[target.name] = str(error)
                session.say(f"{target.name}: {error}")

    async def _measure(self, session: Session, target: Target, seed: int) -> None:
        session.say(f"checking {target.name}" if target.endpoint else f"starting {target.name}")
        async with running(target) as endpoint:
            info = await inspect_endpoint(endpoint, next(iter(self.loads.values())).apis, seed)
            for number, (condition, load) in enumerate(self.loads.items()):
                before = await engine_counters(endpoint)
                # Each load has its own texts, so that no run profits from what an earlier one left in a cache.
                outcome = await session.send(endpoint, info, load, f"{seed}/{number}")
                after = await engine_counters(endpoint)
                held = after.kv_tokens if after is not None else 0
                self.runs.append(Run(target, condition, outcome, CountedAcceptance.between(before, after), held))
                if session.stopped:
                    return


def run_bench(options: BenchOptions) -> int:
    """Measure with the options of the command line."""
    try:
        sweep = Sweep(targets_of(options, _numbers("--k", options.k, int, least=1)), _loads(options))
        session = Session(warmup=options.warmup, timeout_s=options.timeout_s, ignore_eos=options.ignore_eos)
        uvloop.run(session.run(sweep.measure(session, options.seed)))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    runs = _compared(sweep, options.baseline)
    document = _document(options, runs, sweep.not_measured, interrupted=session.stopped)
    show_runs(runs, sweep.not_measured, stopped=session.stopped)
    write_json(options.json_file, document)
    if session.stopped:
        return _INTERRUPTED
    return 0 if runs and not sweep.not_measured and all(run.outcome.done for run in runs) else _FAILED


def _loads(options: BenchOptions) -> dict[Condition, LiveLoad]:
    """Return the requests under each condition, in the order in which they are measured."""
    rates: Sequence[float | None] = _numbers("--rate", options.rate, float, least=1e-9) or (None,)
    temperatures: Sequence[float | None] = _numbers("--temperature", options.temperature, float) or (None,)
    at_once = _numbers("--concurrency", options.concurrency, int, least=1)
    if at_once and options.rate is not None:
        raise UsageError("--concurrency: a closed loop has no --rate; give one of the two")
    if options.rate is None and not at_once and not options.trace:
        raise UsageError("--rate: give the requests per second, --concurrency, or a --trace that has times")
    paces: Sequence[tuple[float | None, int | None]] = [(None, many) for many in at_once]
    paces = paces or [(rate, None) for rate in rates]
    conditions = [Condition(temperature, *pace) for temperature, pace in itertools.product(temperatures, paces)]
    sizes = [options.limit or max(_LEAST, _TURNS * (each.concurrency or 0)) for each in conditions]
    most = sum(sizes) if at_once else options.limit
    records = list(islice(options.records(in_order=True), most)) if options.trace else _generated(options)
    endless = itertools.cycle(records)
    loads: dict[Condition, LiveLoad] = {}
    for condition, size in zip(conditions, sizes, strict=True):
        temperature, rate, many = condition
        asked = list(islice(endless, size)) if many else records  # what is cached of one loop helps no other
        if temperature is not None:
            asked = [replace(one, temperature=temperature) for one in asked]
        timed = [(0.0, one) for one in asked] if many else paced(asked, rate, 1.0, options.seed)
        loads[condition] = LiveLoad.of(timed, options.warmup, many)
    return loads


def _generated(options: BenchOptions) -> list[TraceRecord]:
    """Return requests of random lengths, whose texts are generated when they are sent."""
    random = Random(options.seed)
    prompts = _span("--input-tokens", options.input_tokens)
    answers = _span("--output-tokens", options.output_tokens)
    return [
        TraceRecord(prompt_tokens=random.randint(*prompts), output_tokens=random.randint(*answers))
        for _ in range(options.limit or _REQUESTS)
    ]


def _numbers(
    option: str, text: str | None, kind: Callable[[str], _Number], least: float = 0.0, separator: str = ","
) -> tuple[_Number, ...]:
    """Return the numbers of a list; none without one."""
    if text is None:
        return ()
    try:
        numbers = tuple(kind(part) for part in text.split(separator))
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers, such as 1{separator}2") from None
    if not all(least <= number < math.inf for number in numbers):
        raise UsageError(f"{option} {text}: must be at least {least:g}")
    return numbers


def _span(option: str, text: str) -> tuple[int, int]:
    """Return the ends of `N` or `N-M`."""
    numbers = _numbers(option, text, int, least=1, separator="-")
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise UsageError(f"{option} {text}: expected N or N-M, the smaller one first")
    return numbers[0], numbers[-1]


def _compared(sweep: Sweep, baseline: str | None) -> list[Run]:
    """Return the runs with their speedups over the baseline: the named target, or the first that does not speculate."""
    plain = (target.name for target in sweep.targets if target.method is not None and not target.k)
    name = baseline or next(plain, None)
    of_baseline = {run.condition: run for run in sweep.runs if run.target.name == name}
    return [run.compared(of_baseline.get(run.condition)) for run in sweep.runs]


def _document(
    options: BenchOptions, runs: Sequence[Run], not_measured: Mapping[str, str], *, interrupted: bool
) -> dict[str, Any]:
    """Return the document that `--json` writes."""
    return {
        "trace": [path.name for path in options.trace],
        "seed": options.seed,
        "interrupted": interrupted,
        "not_measured": not_measured,
        "runs": [
            {
                "target": run.target.name,
                "model": run.outcome.model,
                "method": run.target.method,
                "k": run.target.k,
                "simulated": run.target.simulated,
                **run.condition._asdict(),
                **run.figures,
                "each": run.each,
                "kv_tokens": run.kv_tokens,
                "acceptance": run.acceptance,
                "speedup": run.speedup,
            }
            for run in runs
        ],
    }
