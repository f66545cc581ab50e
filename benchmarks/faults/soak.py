"""An hour of mixed faults: whether anything is lost without a word, counters drift, or memory grows."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.asking import MODEL
from benchmarks.faults.batches import Batches
from benchmarks.faults.injections import INJECTIONS, Injection
from benchmarks.faults.load import ANSWERED, LEFT, REFUSED, SILENT, Load, mixed
from benchmarks.faults.stage import Stage, total
from benchmarks.faults.systems import SYSTEMS

_SYSTEM = "gateway, Redis"
_NOT_HERE = {"system-kill", "system-restart", "replica-removed", "clock-jumps"}
"""Faults after which the gateway, or a replica's series, count from zero; one that it must have been started for."""
_MINUTE_S, _IDLE_S, _BATCH_S = 60.0, 60.0, 600.0
_MORE_FILES, _MOST_RUNS = 50, 3


@dataclass(slots=True)
class Soak:
    """What a soak has brought.

    Parameters
    ----------
    rss_mb, open_files
        Of the system, each minute.
    counted
        The gateway's own count of requests, by outcome.
    begun
        Requests that replicas have begun.
    most_runs
        How often the line of a batch was begun that was begun most often.
    """

    faults: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)
    attempts: float = 0.0
    begun: int = 0
    run_twice: int = 0
    batches: Batches = field(default_factory=Batches)
    most_runs: int = 0
    idle_s: float | None = None


async def soak(seconds: float, rate_per_s: float, seed: int, faults: Sequence[str] | None) -> int:
    """Mix faults for a time, and print a line a minute; return the exit status: 1 if there was a problem."""
    system = next(each for each in SYSTEMS if each.name == _SYSTEM)
    injections = [INJECTIONS[name] for name in faults or INJECTIONS if name not in _NOT_HERE]
    run, rng = Soak(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        stage = Stage(system, Path(folder))
        async with stage:
            before = _counts(await stage.metrics())
            load, end_s = Load(stage.port), time.monotonic() + seconds
            watch = asyncio.create_task(_watch(stage, load, run))
            batches = asyncio.create_task(run.batches.run(stage.port, lambda: time.monotonic() > end_s))
            async with load.steady(mixed(seed), rate_per_s):
                while time.monotonic() < end_s:
                    await _one(stage, rng.choice(injections), rng, run, end_s)
            watch.cancel()
            await load.finish()
            await asyncio.wait_for(batches, _BATCH_S)
            run.idle_s = await stage.until_idle(_IDLE_S)
            _sample(stage, run)
            after, journal = _counts(await stage.metrics()), stage.replicas.journal()
    run.counted = {what: after[what] - before[what] for what in after if after[what] != before[what]}
    run.attempts = run.counted.pop("attempts", 0.0)
    ids = {outcome.ask.work.request_id for outcome in load.tally.outcomes}
    run.begun = sum(count for request_id, count in journal.begun.items() if request_id in ids)
    run.run_twice = len(ids.intersection(journal.run_twice()))
    run.most_runs = max((journal.begun[each] for each in run.batches.ids), default=0)
    problems = _problems(run, load, stage.orphans)
    print(f"\n{seconds:g} s at {rate_per_s:g} requests/s, {_summary(run, load, stage.orphans, problems)}", flush=True)
    return 1 if problems else 0


async def _one(stage: Stage, injection: Injection, rng: random.Random, run: Soak, end_s: float) -> None:
    """Inject a fault into some replica, and leave the system in peace for a while."""
    stage.victim = rng.choice(stage.replicas.each)
    length_s = max(rng.uniform(2.0, 8.0), injection.seconds)
    if time.monotonic() + length_s < end_s:
        run.faults[injection.name] += 1
        async with injection.inject(stage):
            await asyncio.sleep(length_s)
    await asyncio.sleep(min(rng.uniform(2.0, 6.0), max(0.0, end_s - time.monotonic())))


async def _watch(stage: Stage, load: Load, run: Soak) -> None:
    while True:
        await asyncio.sleep(_MINUTE_S)
        _sample(stage, run)
        print(
            f"minute {len(run.rss_mb):3}: sent {load.sent}, answered {load.tally.count(ANSWERED)}, failed: "
            f"{_listed(load.tally.failures())}; in flight {len(load.pending)}; {run.rss_mb[-1]:.1f} MB, "
            f"{run.open_files[-1]} files",
            flush=True,
        )


def _sample(stage: Stage, run: Soak) -> None:
    run.rss_mb.append(stage.rss_mb())
    run.open_files.append(stage.open_files())


def _counts(page: str) -> dict[str, float]:
    outcomes = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled", "refused")
    model = f'model="{MODEL}"'
    counts = {outcome: total(page, "gateway_requests_total", model, f'outcome="{outcome}"') for outcome in outcomes}
    return {**counts, "attempts": total(page, "gateway_decisions_total", model)}


def _problems(run: Soak, load: Load, orphans: int) -> list[str]:
    """Return what should not have been, from what the load, the gateway and the replicas have counted."""
    tally, counted, ok = load.tally, sum(run.counted.values()), run.counted.get("ok", 0.0)
    silent, refused, answered = tally.count(*SILENT), tally.count(REFUSED), tally.count(ANSWERED)
    early, late = _early_and_late(run.open_files)
    checks = {
        f"{silent} answers were incomplete or wrong, and looked whole": silent == 0,
        f"{load.sent} requests were sent and {refused} not accepted, but {counted:g} counted": counted
        == load.sent - refused,
        # A client may leave, or an engine report an error, after all was passed on.
        f"{answered} were answered, but {ok:g} counted": answered <= ok <= answered + tally.count(LEFT, "error event"),
        f"replicas began {run.begun}, but {run.attempts:g} were sent": run.begun <= run.attempts,
        f"in flight after {_IDLE_S:g} s": run.idle_s is not None,
        f"open files grew from {early:g} to {late:g}": late <= early + _MORE_FILES,
        f"{orphans} processes were left behind": not orphans,
        f"of {len(run.batches.ids)} lines: {_listed(run.batches.wrong)}": run.batches.ids and not run.batches.wrong,
        f"a line was begun {run.most_runs} times": run.most_runs <= _MOST_RUNS,
    }
    return [what for what, is_well in checks.items() if not is_well]


def _early_and_late(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the second quarter and of the last."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[quarter : 2 * quarter] or values[:1]), statistics.median(values[-quarter:])


def _listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {what}" for what, count in sorted(counts.items())) or "none"


def _summary(run: Soak, load: Load, orphans: int, problems: Sequence[str]) -> str:
    """Return the figures in a few lines of Markdown."""
    tally = load.tally
    memory, files = _early_and_late(run.rss_mb), _early_and_late(run.open_files)
    rows = {
        "sent, answered, left by their clients": f"{load.sent}, {tally.count(ANSWERED)}, {tally.count(LEFT)}",
        "failed": _listed(tally.failures()),
        "run twice to their end": run.run_twice,
        "the gateway's own count": f"{sum(run.counted.values()):g}: {_listed(run.counted)}",
        "attempts that it sent, requests that replicas began": f"{run.attempts:g}, {run.begun}",
        "lines of batches, most runs of one": f"{len(run.batches.ids)}, {run.most_runs}",
        "lines whose one answer is an error": _listed(run.batches.failed),
        "nothing in flight": "never" if run.idle_s is None else f"after {run.idle_s:.1f} s",
        "memory (RSS), second quarter and last": f"{memory[0]:.1f} MB, {memory[1]:.1f} MB",
        "open files, second quarter and last": f"{files[0]:g}, {files[1]:g}",
        "processes left behind": orphans,
        "problems": "; ".join(problems) or "none",
    }
    lines = [f"{run.faults.total()} faults: {_listed(run.faults)}.", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join([*lines, "", f"Verdict: {'NOT WELL' if problems else 'well'}."])
