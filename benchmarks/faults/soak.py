"""An hour of mixed faults: whether anything is lost without a word, counters drift, or memory grows.

Batches run beside, on a model of their own, so that the counts of requests are compared to the last one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.faults.asking import MODEL, Work
from benchmarks.faults.batches import Batches
from benchmarks.faults.injections import INJECTIONS, Injection
from benchmarks.faults.load import ANSWERED, LEFT, REFUSED, SILENT, Ask, Load, mixed, numbers
from benchmarks.faults.stage import Stage, total
from benchmarks.faults.systems import HOSTS, SYSTEMS

_SYSTEM = "gateway, Redis"
_NOT_HERE = {"system-kill", "system-restart", "replica-removed", "clock-jumps"}
"""Faults after which the gateway, or a replica's series, count from zero; one that it must have been started for."""
_MINUTE_S, _IDLE_S, _SAMPLE_S = 60.0, 60.0, 10.0
_START_S, _SLOPE_S, _BLOCKS, _T_975 = 600.0, 2400.0, 8, 2.447
"""What is left out at the start; length of the end over which growth of memory is judged; its parts; Student's t."""
_GROWTH_MB_PER_H, _MORE_FILES = 3.0, 50
_MOST_RUNS = 3
"""Of a line of a batch."""
_FILLING_TURNS, _FILLING_REQUESTS, _FILLING_AT_ONCE = 30, 700, 16
"""What fills the 20,000 prefixes that `learned` remembers of each replica, for which the load takes an hour."""


@dataclass(slots=True)
class Sample:
    """What a minute has brought.

    Parameters
    ----------
    failed
        Failed requests so far, by reason.
    """

    minute: float
    sent: int
    answered: int
    failed: dict[str, int]
    in_flight: int
    rss_mb: float
    open_files: int
    seconds: float = 0.0
    pss_mb: float = 0.0


@dataclass(slots=True)
class Soak:
    """The figures of a soak.

    Parameters
    ----------
    faults
        How often each fault was there.
    counted
        The gateway's own count of requests, by outcome.
    woken
        Requests of those run twice that a replica ended when it woke, which another had got while it was stopped.
    frozen
        Replicas that were stopped, from when and until when.
    batches
        What became of the batches that ran beside.
    most_runs
        How often the line was begun that was begun most often.
    problems
        What should not have been, in words.
    """

    seconds: float
    rate_per_s: float
    samples: list[Sample] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    frozen: list[tuple[str, float, float]] = field(default_factory=list)
    sent: int = 0
    answered: int = 0
    left: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    attempts: float = 0.0
    begun: int = 0
    run_twice: int = 0
    woken: int = 0
    idle_s: float | None = None
    orphans: int = 0
    lag_s: float = 0.0
    batches: Batches = field(default_factory=Batches)
    most_runs: int = 0
    problems: list[str] = field(default_factory=list)


async def soak(seconds: float, rate_per_s: float, seed: int, faults: Sequence[str] | None, target: Path | None) -> int:
    """Mix faults for a time, and print a line a minute; return the exit status: 1 if there was a problem."""
    system = next(each for each in SYSTEMS if each.name == _SYSTEM)
    names = faults or [name for name in INJECTIONS if name not in _NOT_HERE]
    injections = [INJECTIONS[name] for name in names]
    run, rng = Soak(seconds, rate_per_s), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        stage = Stage(system, Path(folder))
        async with stage:
            await _fill(stage)
            before = _counts(await stage.metrics())
            load, end_s = Load(stage.port), time.monotonic() + seconds
            watch, enough = asyncio.create_task(_watch(stage, load, run, target)), asyncio.Event()
            batches = asyncio.create_task(run.batches.run(stage.port, enough))
            async with load.steady(mixed(seed), rate_per_s):
                while time.monotonic() < end_s:
                    await _one(stage, rng.choice(injections), rng, run, end_s)
            watch.cancel()
            enough.set()
            await load.finish()
            await batches
            run.idle_s = await stage.until_idle(_IDLE_S)
            await _close(stage, load, run, before)
        run.orphans = stage.orphans
        if run.orphans:
            run.problems.append(f"{run.orphans} processes were left behind")
    _write(run, target)
    print(f"\n{summary(run)}", flush=True)
    return 1 if run.problems else 0


async def _one(stage: Stage, injection: Injection, rng: random.Random, run: Soak, end_s: float) -> None:
    """Inject a fault into some replica, and leave the system in peace for a while."""
    stage.victim = rng.choice(stage.replicas.each)
    length_s = max(rng.uniform(2.0, 8.0), injection.seconds)
    if time.monotonic() + length_s < end_s:
        run.faults[injection.name] = run.faults.get(injection.name, 0) + 1
        began_s = time.monotonic()
        async with injection.inject(stage):
            await asyncio.sleep(length_s)
            if injection.name == "freeze":
                run.frozen.append((stage.victim.host, began_s, time.monotonic()))
    await asyncio.sleep(min(rng.uniform(2.0, 6.0), max(0.0, end_s - time.monotonic())))


async def _watch(stage: Stage, load: Load, run: Soak, target: Path | None) -> None:
    began_s = time.monotonic()
    for number in count(1):
        await asyncio.sleep(_SAMPLE_S)
        sample = _sample(stage, load, time.monotonic() - began_s)
        run.samples.append(sample)
        if number % (_MINUTE_S // _SAMPLE_S):
            continue
        failed = ", ".join(f"{count} {what}" for what, count in sorted(sample.failed.items())) or "none"
        print(
            f"minute {sample.minute:3.0f}: sent {sample.sent}, answered {sample.answered}, failed: {failed}; in flight "
            f"{sample.in_flight}; {sample.rss_mb:.1f} MB ({sample.pss_mb:.1f} PSS), {sample.open_files} files",
            flush=True,
        )
        _write(run, target)


def _sample(stage: Stage, load: Load, seconds: float) -> Sample:
    tally, minute = load.tally, seconds / 60.0
    answered, failed = tally.count(ANSWERED), dict(tally.failures())
    memory = stage.rss_mb(), stage.open_files(), seconds, stage.pss_mb()
    return Sample(minute, load.sent, answered, failed, len(load.pending), *memory)


async def _fill(stage: Stage) -> None:
    """Fill what is remembered of each replica, so that what grows afterwards is something else."""
    for number, _ in enumerate(HOSTS):
        load = Load(stage.port, {"x-gateway-backend": f"b{number}"})
        for _ in range(_FILLING_REQUESTS):
            if len(load.pending) >= _FILLING_AT_ONCE:
                await asyncio.wait(load.pending, return_when=asyncio.FIRST_COMPLETED)
            load.send(Ask(Work(next(numbers), 1), turns=_FILLING_TURNS))
        tally = await load.finish()
        if tally.failures():
            raise SystemExit(f"b{number} could not be filled: {tally.examples()}")


def growth(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """Return megabytes (PSS) per hour over the last 40 minutes, and half of the 95% interval; None of less than 50.

    Memory grows in steps of arenas, so samples beside one another are not independent: a line goes through means of an
    eighth of the time each.
    """
    if not samples or samples[-1].seconds < _START_S + _SLOPE_S - _SAMPLE_S:
        return None
    last = [each for each in samples if each.seconds > samples[-1].seconds - _SLOPE_S]
    size = len(last) // _BLOCKS
    parts = [last[index * size : (index + 1) * size] for index in range(_BLOCKS)]
    hours = [statistics.fmean(each.seconds for each in part) / 3600.0 for part in parts]
    mb = [statistics.fmean(each.pss_mb for each in part) for part in parts]
    slope, base = statistics.linear_regression(hours, mb)
    rest = sum((y - base - slope * x) ** 2 for x, y in zip(hours, mb, strict=True)) / (_BLOCKS - 2)
    spread = sum((x - statistics.fmean(hours)) ** 2 for x in hours)
    return slope, _T_975 * (rest / spread) ** 0.5


def _was_woken(begun: dict[str, float], ended: dict[str, float], run: Soak) -> bool:
    """Return whether a replica ended a request when it woke, which another had got while it was stopped."""
    return any(
        ended.get(host, 0.0) >= until_s
        and any(other != host and from_s < at_s < until_s for other, at_s in begun.items())
        for host, from_s, until_s in run.frozen
    )


def _counts(page: str) -> dict[str, float]:
    outcomes = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled", "refused")
    model = f'model="{MODEL}"'
    counts = {outcome: total(page, "gateway_requests_total", model, f'outcome="{outcome}"') for outcome in outcomes}
    return {**counts, "attempts": total(page, "gateway_decisions_total", model)}


async def _close(stage: Stage, load: Load, run: Soak, before: dict[str, float]) -> None:
    """Compare what the load, the gateway and the replicas have counted."""
    tally, journal = load.tally, stage.replicas.journal()
    ids = {outcome.ask.work.request_id for outcome in tally.outcomes}
    run.sent, run.answered, run.left = load.sent, tally.count(ANSWERED), tally.count(LEFT)
    run.failed, run.examples = dict(tally.failures()), tally.examples()
    after = _counts(await stage.metrics())
    run.counted = {what: after[what] - before[what] for what in after if after[what] != before[what]}
    run.attempts = run.counted.pop("attempts", 0.0)
    run.begun = sum(count for request_id, count in journal.begun.items() if request_id in ids)
    run.lag_s = load.lag_s
    run.most_runs = max((journal.begun[each] for each in run.batches.ids), default=0)
    twice = ids.intersection(journal.run_twice())
    run.run_twice = len(twice)
    run.woken = sum(
        _was_woken(stage.replicas.times("begin", each), stage.replicas.times("end", each), run) for each in twice
    )
    run.problems = _problems(run, tally.count(*SILENT), tally.count(REFUSED))


def _problems(run: Soak, silent: int, refused: int) -> list[str]:
    counted, ok = sum(run.counted.values()), run.counted.get("ok", 0.0)
    events = run.failed.get("error event", 0)
    checks = {
        f"{silent} answers were incomplete or wrong, and looked whole": silent == 0,
        f"{run.run_twice - run.woken} requests were run twice to their end": run.run_twice == run.woken,
        f"{run.sent} requests were sent and {refused} not accepted, but {counted:g} counted": counted
        == run.sent - refused,
        # A client may leave, or an engine report an error, after all was passed on.
        f"{run.answered} were answered, but {ok:g} counted": run.answered <= ok <= run.answered + run.left + events,
        f"replicas began {run.begun}, but {run.attempts:g} were sent": run.begun <= run.attempts,
        f"in flight after {_IDLE_S:g} s": run.idle_s is not None,
        f"of {run.batches.lines} lines: {dict(run.batches.wrong)}": not run.batches.wrong,
        f"a line was begun {run.most_runs} times": run.most_runs <= _MOST_RUNS,
    }
    if (found := growth(run.samples)) is not None:
        low = found[0] - found[1]
        checks[f"memory grows by more than {_GROWTH_MB_PER_H:g} MB an hour: {found[0]:.1f} +- {found[1]:.1f}"] = (
            low <= _GROWTH_MB_PER_H
        )
    quarter = len(run.samples) // 4
    if quarter:
        second, last = run.samples[quarter : 2 * quarter], run.samples[-quarter:]
        early, late = (statistics.median(each.open_files for each in part) for part in (second, last))
        checks[f"open files grew from {early:g} to {late:g}"] = late <= early + _MORE_FILES
    return [what for what, is_well in checks.items() if not is_well]


def _write(run: Soak, target: Path | None) -> None:
    if target is not None:
        target.write_text(json.dumps(asdict(run), indent=1) + "\n")


def summary(run: Soak) -> str:
    """Return the figures in a few lines of Markdown."""
    failed = ", ".join(f"{count} {what}" for what, count in sorted(run.failed.items())) or "none"
    counted = ", ".join(f"{count:g} {what}" for what, count in run.counted.items())
    times = ", ".join(f"{name} ({count})" for name, count in sorted(run.faults.items()))
    idle = "never" if run.idle_s is None else f"after {run.idle_s:.1f} s"
    quarter = max(1, len(run.samples) // 4)
    parts = run.samples[quarter : 2 * quarter] or run.samples[:1], run.samples[-quarter:]
    early, late = (statistics.median(each.rss_mb for each in part) for part in parts)
    files = [statistics.median(each.open_files for each in part) for part in parts]
    lines = [
        f"{run.seconds:g} s at {run.rate_per_s:g} requests/s, {sum(run.faults.values())} faults: {times}.",
        "",
        "| | |",
        "|---|---|",
        f"| sent, answered, left by their clients | {run.sent}, {run.answered}, {run.left} |",
        f"| failed | {failed} |",
        f"| run twice to their end | {run.run_twice}, of which {run.woken} by a replica that was stopped, and woke |",
        f"| the gateway's own count | {sum(run.counted.values()):g}: {counted} |",
        f"| attempts that it sent, requests that replicas began | {run.attempts:g}, {run.begun} |",
        f"| batches that ended, their lines, answered once | {run.batches.ended}, {run.batches.lines}, "
        f"{run.batches.answered} |",
        f"| most runs of a line | {run.most_runs} |",
        f"| nothing in flight | {idle} |",
        f"| memory (RSS), second quarter and last | {early:.1f} MB, {late:.1f} MB |",
        f"| growth of memory (PSS), last 40 minutes, 95% interval | {_shown(growth(run.samples))} |",
        f"| open files, second quarter and last | {files[0]:g}, {files[1]:g} |",
        f"| processes left behind | {run.orphans} |",
        f"| problems | {'; '.join(run.problems) or 'none'} |",
    ]
    well = "well" if growth(run.samples) is not None else "well, but too short to judge the memory"
    return "\n".join([*lines, "", f"Verdict: {'NOT WELL' if run.problems else well}."])


def _shown(found: tuple[float, float] | None) -> str:
    return "too short to say" if found is None else f"{found[0]:+.1f} +- {found[1]:.1f} MB an hour"
