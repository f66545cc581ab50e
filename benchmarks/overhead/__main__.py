"""Measure CPU time per request and chunk, added latency and memory of each system: `python -m benchmarks.overhead`.

The system under test runs on the first core, upstream and load generator on the second. CPU is the user and system time
of the system's whole process tree, divided by the requests (or chunks) that the upstream sent; on a noisy machine it is
steadier than any latency. Each figure is the median of ROUNDS rounds, in which the systems take turns. Systems that are
not installed are skipped; `benchmarks/overhead/run` installs the peers and a compiled gateway, and runs this.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.overhead.endurance import open_streams, workers
from benchmarks.overhead.measure import LOADS, Cell, Load, measure
from benchmarks.overhead.systems import POOLS, systems
from benchmarks.table import head, row

_ALONE = "none (upstream alone)"


def main() -> None:
    """Measure all systems in turn and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="0: only the endurance measurements")
    parser.add_argument("--only", action="append", help="part of a system's name; may be repeated")
    parser.add_argument("--load", action="append", help="start of a load's name; may be repeated")
    parser.add_argument(
        "--pool",
        action="append",
        type=Path,
        default=[],
        help="pool file to use instead of those in pools/; may be repeated",
    )
    parser.add_argument(
        "--build",
        action="append",
        default=[],
        help="NAME=COMMAND of an installed gateway; several are compared in turns",
    )
    parser.add_argument("--seconds", type=float, help="seconds per round, instead of the load's own")
    parser.add_argument("--streams", type=int, default=10_000, help="open streams to hold; 0 to skip")
    parser.add_argument("--workers", type=int, default=3, help="rounds that compare two workers with one; 0 to skip")
    arguments = parser.parse_args()
    parts = arguments.only or [""]
    chosen = [
        system for system in systems(arguments.pool, arguments.build) if any(part in system.name for part in parts)
    ]
    loads = [load for load in LOADS if load.name.startswith(tuple(arguments.load or [""]))]
    cells: dict[tuple[str, str], Cell] = {}
    missing: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        for _ in range(arguments.rounds):
            for load in loads:
                for system in (None, *chosen):
                    label = system.name if system else _ALONE
                    cell = cells.setdefault((load.name, label), Cell())
                    try:
                        measure(system, load, cell, folder)
                    except FileNotFoundError:
                        missing.add(label)
        for load in loads if arguments.rounds else ():
            _print_table(load, {label: cell for (kind, label), cell in cells.items() if kind == load.name})
        if missing:
            print(f"\nNot installed: {', '.join(sorted(missing))}")
        pool = (arguments.pool or [POOLS / "everything.yaml"])[-1]
        if arguments.streams:
            print("\n" + open_streams(pool, arguments.streams, folder), flush=True)
        if arguments.workers:
            print("\n" + workers(pool, arguments.workers, folder), flush=True)


def _print_table(load: Load, cells: dict[str, Cell]) -> None:
    """Print the medians; added latency is the system's latency less that of the upstream alone."""
    alone = cells[_ALONE]
    unit, what = ("chunk", "streams") if load.chunk_interval_s else ("request", "requests")
    print(f"\n### {load.name}\n")
    columns = ("added p50 ms", "added p99 ms", "RSS MB", "errors", "not recorded")
    print(head("system", f"CPU us/{unit}", f"{what}/s", *columns))
    for label, cell in cells.items():
        if not cell.p50_ms:
            continue
        medians = {key: statistics.median(getattr(cell, key) or [0.0]) for key in Cell.__slots__ if key != "errors"}
        left_out = f"{medians['left_out']:.1%}" if cell.left_out else ""
        added = [medians[key] - statistics.median(getattr(alone, key)) for key in ("p50_ms", "p99_ms")]
        figures = f"{medians['cpu_us']:.1f}", f"{medians['requests_per_s']:.0f}", *(f"{each:.2f}" for each in added)
        print(row(label, *figures, f"{medians['rss_mb']:.0f}", cell.errors, left_out), flush=True)


if __name__ == "__main__":
    main()
