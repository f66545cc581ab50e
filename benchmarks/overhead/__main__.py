"""`python -m benchmarks.overhead`: CPU per request and per chunk, added latency, memory, of each system in turn.

Two cores: the system under test has the first, upstream and load the second. CPU is user and system time of the
system's whole process tree over the requests (or chunks) that the upstream sent: it hangs less on a noisy machine than
any latency does. Each cell is the median of ROUNDS rounds, the systems in turns. What is not installed is left out;
`benchmarks/overhead/run` installs the peers and a compiled gateway, and runs this.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.overhead.endurance import open_streams, soak, workers
from benchmarks.overhead.measure import LOADS, Cell, Load, measure
from benchmarks.overhead.systems import POOLS, systems

_ALONE = "none (upstream alone)"


def main() -> None:
    """Measure all systems in turns and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="0: only what is measured once")
    parser.add_argument("--only", action="append", help="part of a system's name; may be given again")
    parser.add_argument("--load", action="append", help="beginning of a load's name; may be given again")
    parser.add_argument("--pool", action="append", type=Path, default=[], help="a pool file instead of those of pools/")
    parser.add_argument("--seconds", type=float, help="of each round, instead of the load's own")
    parser.add_argument("--streams", type=int, default=10_000, help="open streams to hold; 0 for none")
    parser.add_argument("--soak", type=int, default=1_000_000, help="requests in a row; 0 for none")
    parser.add_argument("--workers", type=int, default=3, help="rounds of two workers against one; 0 for none")
    given = parser.parse_args()
    chosen = [one for one in systems(given.pool) if not given.only or any(part in one.name for part in given.only)]
    loads = [one for one in LOADS if not given.load or any(one.name.startswith(part) for part in given.load)]
    cells: dict[tuple[str, str], Cell] = {}
    missing: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        for _ in range(given.rounds):
            for load in loads:
                for system in (None, *chosen):
                    label = system.name if system else _ALONE
                    cell = cells.setdefault((load.name, label), Cell())
                    if not measure(system, load, cell, folder):
                        missing.add(label)
        for load in loads if given.rounds else ():
            _print_table(load, {label: cell for (kind, label), cell in cells.items() if kind == load.name})
        if missing:
            print(f"\nNot installed: {', '.join(sorted(missing))}")
        pool = (given.pool or [POOLS / "everything.yaml"])[-1]
        if given.streams:
            print("\n" + open_streams(pool, given.streams, folder), flush=True)
        if given.workers:
            print("\n" + workers(pool, given.workers, folder), flush=True)
        if given.soak:
            print("\n" + soak(pool, given.soak, folder), flush=True)


def _print_table(load: Load, cells: dict[str, Cell]) -> None:
    """Print the medians; added latency is a system's less the upstream's alone."""
    alone = cells[_ALONE]
    unit, what = ("chunk", "streams") if load.chunk_interval_s else ("request", "requests")
    print(f"\n### {load.name}\n")
    columns = f"CPU us/{unit} | {what}/s | added p50 ms | added p99 ms | over 1 ms | RSS MB | errors | not recorded"
    print(f"| system | {columns} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for label, cell in cells.items():
        if not cell.p50_ms:
            continue
        middle = {key: statistics.median(getattr(cell, key) or [0.0]) for key in Cell.__slots__ if key != "errors"}
        left_out = f"{middle['left_out']:.1%}" if cell.left_out else ""
        added = [middle[key] - statistics.median(getattr(alone, key)) for key in ("p50_ms", "p99_ms")]
        print(
            f"| {label} | {middle['cpu_us']:.1f} | {middle['requests_per_s']:.0f} | {added[0]:.2f} | {added[1]:.2f} | "
            f"{middle['over_1_ms']:.2%} | {middle['rss_mb']:.0f} | {cell.errors} | "
            f"{left_out} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
