"""Measure the endpoint picker under real Envoy: `python -m benchmarks.picker`.

Closed-loop streams go to the same upstream through Envoy alone (replicas take turns), and through Envoy with `gateway
picker`, with two pools. Answers are shown to the picker where its pool needs them. The upstream answers like an engine
that is not saturated: the first of 20 chunks after 0.4 s, then one each 20 ms, so a stream takes at least 0.8 s and 150
streams ask for at most 188 requests/s. They begin over 0.8 s, since streams that begin together stay together. The
system under test runs on the first core; upstream and load generator on the second. CPU is the user and system time of
the process trees while all streams run, divided by the requests that the upstream answered meanwhile. Systems take
turns; each figure is the median of ROUNDS rounds, with other bodies in each.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.launch.ports import free_port
from benchmarks.envoy import envoy_command, picker_configuration, without_picker
from benchmarks.overhead.systems import POOLS
from benchmarks.process import (
    SYSTEM_CPU,
    cpu_s,
    load,
    running,
    stats,
    tree,
    until_answered,
    until_idle,
    upstream,
)
from benchmarks.systems import environment
from benchmarks.table import head, row

SHOWN = {"routing": False, "everything": True}
"""By pool: whether anything needs the answers."""
ALONE = "Envoy alone"
_HEADERS = ("authorization: Bearer sk-bench",)
_REPLICAS = 8
_CHUNKS, _FIRST_S, _INTERVAL_S = 20, 0.4, 0.02
_WARM_S, _MARGIN_S = 1.0, 0.5


@dataclass(frozen=True, slots=True)
class System:
    """What requests go through.

    Attributes
    ----------
    port
        Where it takes requests.
    processes
        Its processes, by the name under which their time is counted; their children count with them.
    """

    name: str
    port: int
    processes: dict[str, int]


@dataclass(slots=True)
class Cell:
    """The rounds of one system under one load."""

    ttft_p50_ms: list[float] = field(default_factory=list)
    ttft_p99_ms: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    errors: int = 0


@contextlib.contextmanager
def systems(upstream_port: int, folder: Path, gateway: str) -> Iterator[list[System]]:
    """Start all systems in front of an upstream."""
    env = environment(upstream_port, folder)
    replicas = [f"127.0.0.{number}:{upstream_port}" for number in range(1, _REPLICAS + 1)]
    with ExitStack() as stack:

        def start(name: str, argv: list[str]) -> int:
            log = folder / f"{name}.log"
            return stack.enter_context(running(argv, {SYSTEM_CPU}, log, env))

        port = free_port()
        document = without_picker(picker_configuration(port, free_port(), ["127.0.0.1:1"], replicas))
        found = [System(ALONE, port, {"Envoy": start(ALONE, envoy_command(document, folder / "alone.yaml"))})]
        for pool, is_shown in SHOWN.items():
            port, asked, own = free_port(), free_port(), free_port()
            config = ["--config", str(POOLS / f"{pool}.yaml"), "--workers", "1"]
            name = f"picker, {pool}"
            picker = start(name, [gateway, "picker", *config, "--port", str(own), "--listen", f"127.0.0.1:{asked}"])
            document = picker_configuration(port, free_port(), [f"127.0.0.1:{asked}"], replicas, is_shown=is_shown)
            envoy = start(f"Envoy, {pool}", envoy_command(document, folder / f"{pool}.yaml"))
            found.append(System(name, port, {"picker": picker, "Envoy": envoy}))
        for system in found:
            until_answered(system.port, _HEADERS, folder / f"{system.name}.log")
        for system in found:
            for pid in system.processes.values():
                until_idle(pid)
        yield found


def measure(system: System, upstream_port: int, streams: int, size: int, seconds: float, seed: int, cell: Cell) -> None:
    """Run one round of one system."""
    options = {"stream": True, "seed": seed, "spread_s": _FIRST_S + _CHUNKS * _INTERVAL_S}
    pids = {name: tree(pid) for name, pid in system.processes.items()}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, system.port, streams, _WARM_S + seconds, size, headers=_HEADERS, **options)
        while stats(upstream_port)["streams"] < streams and not running.done():
            time.sleep(_MARGIN_S)
        began_s, before = time.monotonic(), stats(upstream_port)
        spent_s = {name: -cpu_s(each) for name, each in pids.items()}
        time.sleep(seconds - _MARGIN_S)
        spent_s = {name: spent_s[name] + cpu_s(each) for name, each in pids.items()}
        requests = max(1, stats(upstream_port)["chunks"] - before["chunks"]) / _CHUNKS
        lasted_s = time.monotonic() - began_s
        result: dict[str, Any] = running.result()
    for name, each_s in spent_s.items():
        cell.cpu_us.setdefault(name, []).append(1e6 * each_s / requests)
    cell.ttft_p50_ms.append(result["ttft_ms"].get("p50", float("nan")))
    cell.ttft_p99_ms.append(result["ttft_ms"].get("p99", float("nan")))
    cell.requests_per_s.append(requests / lasted_s)
    cell.errors += result["errors"]


def print_table(cells: dict[str, Cell]) -> None:
    """Print the medians."""
    print(head("system", "TTFT added p50 ms", "p99 ms", "requests/s", "CPU us/request", "errors"))
    median, alone = statistics.median, cells[ALONE]
    for name, cell in cells.items():
        added = [
            median(cell.ttft_p50_ms) - median(alone.ttft_p50_ms),
            median(cell.ttft_p99_ms) - median(alone.ttft_p99_ms),
        ]
        figures = [f"{each:.1f}" for each in (*added, median(cell.requests_per_s))]
        cpu_us = " + ".join(f"{part} {median(values):.0f}" for part, values in cell.cpu_us.items())
        print(row(name, *figures, cpu_us, cell.errors))


def main() -> None:
    """Measure all systems in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", default=shutil.which("gateway") or str(Path(sys.executable).with_name("gateway")))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one system in one round")
    parser.add_argument("--streams", type=int, default=150)
    parser.add_argument("--size", type=int, default=220_000, help="bytes of a prompt")
    arguments = parser.parse_args()
    engine = {"FIRST_S": str(_FIRST_S), "INTERVAL_S": str(_INTERVAL_S), "CHUNKS": str(_CHUNKS)}
    with tempfile.TemporaryDirectory(prefix="picker-") as name:
        folder, upstream_port = Path(name), free_port()
        with upstream(upstream_port, folder, engine), systems(upstream_port, folder, arguments.gateway) as started:
            cells = {system.name: Cell() for system in started}
            asked = arguments.streams, arguments.size, arguments.seconds
            for seed in range(arguments.rounds):
                for system in started:
                    measure(system, upstream_port, *asked, seed, cells[system.name])
            print_table(cells)


if __name__ == "__main__":
    main()
