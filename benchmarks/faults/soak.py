"""An hour of mixed faults: whether anything is lost without a word, counters drift, or memory grows."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.faults.injections import INJECTIONS, Injection
from benchmarks.faults.load import ANSWERED, LEFT, REFUSED, SILENT, Load, mixed
from benchmarks.faults.stage import Stage, total
from benchmarks.faults.systems import SYSTEMS

_SYSTEM = "gateway, Redis"
_NOT_HERE = {"system-kill", "system-restart", "replica-removed", "clock-jumps"}
"""Faults after which the gateway, or a replica's series, count from zero; one that it must have been started for."""
_MINUTE_S, _IDLE_S = 60.0, 60.0
_GROWTH_MB, _GROWTH_SHARE, _MORE_FILES = 10.0, 0.1, 50


@dataclass(slots=True)
class Sample:
    """What a minute has brought.

    Parameters
    ----------
    failed
        Failed requests so far, by reason.
    """

    minute: int
    sent: int
    answered: int
    failed: dict[str, int]
    in_flight: int
    rss_mb: float
    open_files: int


@dataclass(slots=True)
class Soak:
    """The figures of a soak.

    Parameters
    ----------
    faults
        How often each fault was there.
    counted
        The gateway's own count of requests, by outcome.
    problems
        What should not have been, in words.
    """

    seconds: float
    rate_per_s: float
    samples: list[Sample] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    answered: int = 0
    left: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    attempts: float = 0.0
    begun: int = 0
    run_twice: int = 0
    idle_s: float | None = None
    orphans: int = 0
    lag_s: float = 0.0
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
            before = _counts(await stage.metrics())
            load, end_s = Load(stage.port), time.monotonic() + seconds
            watch = asyncio.create_task(_watch(stage, load, run, target))
            async with load.steady(mixed(seed), rate_per_s):
                while time.monotonic() < end_s:
                    await _one(stage, rng.choice(injections), rng, run, end_s)
            watch.cancel()
            await load.finish()
            run.idle_s = await stage.until_idle(_IDLE_S)
            run.samples.append(_sample(stage, load, len(run.samples) + 1))
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
        async with injection.inject(stage):
            await asyncio.sleep(length_s)
    await asyncio.sleep(min(rng.uniform(2.0, 6.0), max(0.0, end_s - time.monotonic())))


async def _watch(stage: Stage, load: Load, run: Soak, target: Path | None) -> None:
    while True:
        await asyncio.sleep(_MINUTE_S)
        sample = _sample(stage, load, len(run.samples) + 1)
        run.samples.append(sample)
        failed = ", ".join(f"{count} {what}" for what, count in sorted(sample.failed.items())) or "none"
        print(
            f"minute {sample.minute:3}: sent {sample.sent}, answered {sample.answered}, failed: {failed}; in flight "
            f"{sample.in_flight}; {sample.rss_mb:.1f} MB, {sample.open_files} files",
            flush=True,
        )
        _write(run, target)


def _sample(stage: Stage, load: Load, minute: int) -> Sample:
    tally = load.tally
    answered, failed = tally.count(ANSWERED), dict(tally.failures())
    return Sample(minute, load.sent, answered, failed, len(load.pending), stage.rss_mb(), stage.open_files())


def _counts(page: str) -> dict[str, float]:
    outcomes = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled", "refused")
    counts = {outcome: total(page, "gateway_requests_total", f'outcome="{outcome}"') for outcome in outcomes}
    return {**counts, "attempts": total(page, "gateway_decisions_total")}


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
    run.run_twice = len(ids.intersection(journal.run_twice()))
    run.problems = _problems(run, tally.count(*SILENT), tally.count(REFUSED))


def _problems(run: Soak, silent: int, refused: int) -> list[str]:
    counted, ok = sum(run.counted.values()), run.counted.get("ok", 0.0)
    events = run.failed.get("error event", 0)
    checks = {
        f"{silent} answers were incomplete or wrong, and looked whole": silent == 0,
        f"{run.run_twice} requests were run twice to their end": run.run_twice == 0,
        f"{run.sent} requests were sent and {refused} not accepted, but {counted:g} counted": counted
        == run.sent - refused,
        # A client may leave, or an engine report an error, after all was passed on.
        f"{run.answered} were answered, but {ok:g} counted": run.answered <= ok <= run.answered + run.left + events,
        f"replicas began {run.begun}, but {run.attempts:g} were sent": run.begun <= run.attempts,
        f"in flight after {_IDLE_S:g} s": run.idle_s is not None,
    }
    quarter = len(run.samples) // 4
    if quarter:
        second, last = run.samples[quarter : 2 * quarter], run.samples[-quarter:]
        early_mb, late_mb = (statistics.median(each.rss_mb for each in part) for part in (second, last))
        limit_mb = early_mb + max(_GROWTH_MB, _GROWTH_SHARE * early_mb)
        checks[f"memory grew from {early_mb:.1f} to {late_mb:.1f} MB"] = late_mb <= limit_mb
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
        f"| run twice to their end | {run.run_twice} |",
        f"| the gateway's own count | {sum(run.counted.values()):g}: {counted} |",
        f"| attempts that it sent, requests that replicas began | {run.attempts:g}, {run.begun} |",
        f"| nothing in flight | {idle} |",
        f"| memory, second quarter and last | {early:.1f} MB, {late:.1f} MB |",
        f"| open files, second quarter and last | {files[0]:g}, {files[1]:g} |",
        f"| processes left behind | {run.orphans} |",
        f"| problems | {'; '.join(run.problems) or 'none'} |",
    ]
    return "\n".join(lines)
