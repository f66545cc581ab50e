"""Measurements that take longer than a round: many open streams, several workers."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from backends.launch.ports import free_port
from benchmarks.overhead.systems import gateway
from benchmarks.process import (
    LOAD_CPU,
    SYSTEM_CPU,
    cpu_s,
    load,
    load_command,
    most_files,
    rss_mb,
    running,
    stats,
    tree,
    upstream,
)
from benchmarks.systems import started

_SPARE_FILES = 200
_SLOW = {"CHUNKS": "1000", "INTERVAL_S": "10"}
_QUICK = {"CHUNKS": "1", "INTERVAL_S": "0"}


def open_streams(pool: Path, streams: int, folder: Path) -> str:
    """Hold `streams` streams open through one worker and report its memory; fewer if the file limit is too low."""
    system = gateway(pool)
    streams = min(streams, (most_files() - _SPARE_FILES) // 2)  # two files each: the client's and the backend's
    behind = free_port()
    with upstream(behind, folder, _SLOW), started(system, behind, folder, {SYSTEM_CPU}) as (port, pid):
        pids = tree(pid)
        idle_mb = rss_mb(pids)
        argv = load_command(port, streams, 100_000, 2000, stream=True, headers=system.headers)
        with running(argv, {LOAD_CPU}, folder / "load.log"):
            end_s = time.monotonic() + 120
            while (open_now := stats(behind)["streams"]) < streams and time.monotonic() < end_s:
                time.sleep(0.5)
            time.sleep(2.0)
            held_mb = rss_mb(pids)
    each_kb = (held_mb - idle_mb) * 1024 / max(1, open_now)
    return f"{open_now} open streams in one worker: {held_mb:.0f} MB ({idle_mb:.0f} idle; {each_kb:.1f} KB per stream)"


def workers(pool: Path, rounds: int, folder: Path) -> str:
    """Report how much more two workers carry than one, on one core each.

    It goes by the CPU time per request, which stays the same if the workers share the requests evenly and do not wait
    for each other.
    """
    cost: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for number in (1, 2):
            system, behind = gateway(pool, workers=number), free_port()
            with upstream(behind, folder, _QUICK), started(system, behind, folder, {0, 1}) as (port, pid):
                pids = tree(pid)
                load(port, 64, 1.0, 2000, headers=system.headers)
                before, spent_s = stats(behind)["requests"], -cpu_s(pids)
                load(port, 64, 4.0, 2000, headers=system.headers)
                spent_s += cpu_s(pids)
                cost[number].append(1e6 * spent_s / (stats(behind)["requests"] - before))
    one_us, two_us = map(median, cost.values())
    carried = f"{2.0 * one_us / two_us:.2f} times as much as one"
    return f"two workers carry {carried} (CPU per request: {one_us:.1f} us with one, {two_us:.1f} with two)"
