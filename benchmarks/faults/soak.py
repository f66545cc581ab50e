"""An hour of mixed faults: whether anything is lost without a word, counters drift, or memory grows."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults.asking import MODEL
from benchmarks.faults.batches import Batches
from benchmarks.faults.injections import INJECTIONS, Injection
from benchmarks.faults.load import ANSWERED, LEFT, REFUSED, SILENT, Load, mixed
from benchmarks.faults.stage import Stage
from benchmarks.faults.systems import SYSTEMS
from benchmarks.metrics_page import total

_SYSTEM = "gateway, Redis"
_NOT_HERE = {"system-kill", "system-restart", "replica-removed", "clock-jumps"}
"""Faults after which the gateway, or a replica's series, count from zero; one that it must have been started for."""
_MINUTE_S, _IDLE_S, _BATCH_S = 60.0, 60.0, 600.0
_MORE_FILES, _MOST_RUNS = 50, 3
_OUTCOMES = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled", "refused")


async def soak(seconds: float, rate_per_s: float, seed: int, faults: Sequence[str] | None) -> int:
    """Mix faults for a time, and print a line a minute; return the exit status: 1 if there was a problem."""
    system = next(each for each in SYSTEMS if each.name == _SYSTEM)
    injections = [INJECTIONS[name] for name in faults or INJECTIONS if name not in _NOT_HERE]
    injected, rng, batches, samples = Counter[str](), random.Random(seed), Batches(), list[tuple[float, int]]()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        async with (stage := Stage(system, Path(folder))):
            before = _counts(await stage.metrics())
            load, end_s = Load(stage.port), time.monotonic() + seconds
            watch = asyncio.create_task(_watch(stage, load, samples))
            running = asyncio.create_task(batches.run(stage.port, lambda: time.monotonic() > end_s))
            async with load.steady(mixed(seed), rate_per_s):
                while time.monotonic() < end_s:
                    await _one(stage, rng.choice(injections), rng, injected, end_s)
            watch.cancel()
            await load.finish()
            await asyncio.wait_for(running, _BATCH_S)
            idle_s = await stage.until_idle(_IDLE_S)
            samples.append((stage.rss_mb(), stage.open_files()))
            after, journal = _counts(await stage.metrics()), stage.replicas.journal()
    counted = {what: after[what] - before[what] for what in after}
    attempts = counted.pop("attempts")
    ids = {outcome.ask.work.request_id for outcome in load.tally.outcomes}
    begun = sum(count for request_id, count in journal.begun.items() if request_id in ids)
    most_runs = max((journal.begun[each] for each in batches.ids), default=0)
    tally, ok = load.tally, counted["ok"]
    silent, refused, answered = tally.count(*SILENT), tally.count(REFUSED), tally.count(ANSWERED)
    (early_mb, late_mb), (early, late) = (_early_and_late(each) for each in zip(*samples, strict=True))
    checks = {
        f"{silent} answers were incomplete or wrong, and looked whole": silent == 0,
        f"{load.sent} were sent and {refused} not accepted; the gateway counted {sum(counted.values()):g}": sum(
            counted.values()
        )
        == load.sent - refused,
        # A client may leave, or an engine report an error, after all was passed on.
        f"{answered} were answered, {ok:g} counted": answered <= ok <= answered + tally.count(LEFT, "error event"),
        f"{attempts:g} were sent to replicas, which began {begun}": begun <= attempts,
        f"nothing in flight after {idle_s} s": idle_s is not None,
        f"open files: first {early:g}, later {late:g}": late <= early + _MORE_FILES,
        f"{stage.orphans} processes were left behind": not stage.orphans,
        f"of {len(batches.ids)} lines not with one answer: {_listed(batches.wrong)}": batches.ids and not batches.wrong,
        f"a line was begun {most_runs} times at most": most_runs <= _MOST_RUNS,
    }
    print(f"\n{seconds:g} s at {rate_per_s:g} requests/s, {injected.total()} faults: {_listed(injected)}")
    print(f"failed: {_listed(tally.failures())}; run twice to their end: {len(ids.intersection(journal.run_twice()))}")
    print(
        f"lines whose answer is an error: {_listed(batches.failed)}; memory {early_mb:.1f} MB, later {late_mb:.1f} MB"
    )
    print(
        *(f"{'well    ' if is_well else 'NOT WELL'} {what}" for what, is_well in checks.items()), sep="\n", flush=True
    )
    return 0 if all(checks.values()) else 1


async def _one(stage: Stage, injection: Injection, rng: random.Random, injected: Counter[str], end_s: float) -> None:
    """Inject a fault into some replica, and leave the system in peace for a while."""
    stage.victim = rng.choice(stage.replicas.each)
    length_s = max(rng.uniform(2.0, 8.0), injection.seconds)
    if time.monotonic() + length_s < end_s:
        injected[injection.name] += 1
        async with injection.inject(stage):
            await asyncio.sleep(length_s)
    await asyncio.sleep(min(rng.uniform(2.0, 6.0), max(0.0, end_s - time.monotonic())))


async def _watch(stage: Stage, load: Load, samples: list[tuple[float, int]]) -> None:
    """Sample memory and open files each minute, and print what became of the requests so far."""
    while True:
        await asyncio.sleep(_MINUTE_S)
        samples.append((stage.rss_mb(), stage.open_files()))
        print(
            f"minute {len(samples):3}: sent {load.sent}, answered {load.tally.count(ANSWERED)}, failed: "
            f"{_listed(load.tally.failures())}; in flight {len(load.pending)}; {samples[-1][0]:.1f} MB, "
            f"{samples[-1][1]} files",
            flush=True,
        )


def _counts(page: str) -> dict[str, float]:
    counts = {each: total(page, "gateway_requests_total", model=MODEL, outcome=each) for each in _OUTCOMES}
    return {**counts, "attempts": total(page, "gateway_decisions_total", model=MODEL)}


def _early_and_late(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the second quarter and of the last."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[quarter : 2 * quarter] or values[:1]), statistics.median(values[-quarter:])


def _listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {what}" for what, count in sorted(counts.items())) or "none"
