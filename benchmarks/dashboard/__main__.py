"""Measure what open dashboards cost the gateway: `python -m benchmarks.dashboard [--pages 20]`.

A gateway with the policy `learned` has eight replicas (`benchmarks.overhead.upstream`). It is measured under a steady
load of streams, and idle, each time in turns with PAGES open pages and with none, which follow many decisions to show.
The cost is the difference of the gateway's CPU time (user and system, all threads) between two neighbouring turns, as a
share of one core: the mean of ROUNDS such pairs, with its standard error. The gateway runs on the first core; upstream,
load and pages on the second.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from backends.launch.ports import free_port
from benchmarks.overhead.process import LOAD_CPU, SYSTEM_CPU, running, until_answered, until_idle, upstream

_POOL = Path(__file__).parent / "pool.yaml"
_KEY = "bench-admin"
_CHUNKS, _INTERVAL_S = 64, 0.02


class _Pages:
    """Open pages, in a process of their own."""

    def __init__(self, port: int, count: int, seconds: float) -> None:
        command = [sys.executable, "-m", "benchmarks.dashboard.pages", str(port), str(count), str(seconds), _KEY]
        self._process = subprocess.Popen(["taskset", "-c", str(LOAD_CPU), *command], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        if not self._lines.readline():
            raise SystemExit("the pages cannot be opened")

    def close(self) -> dict[str, Any]:
        """Return what was read, once they have been open for long enough."""
        read: dict[str, Any] = json.loads(self._lines.readline())
        self._process.wait()
        return read


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, exactly: `/proc/PID/stat` counts in steps of 10 ms."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _turn(pid: int, seconds: float) -> float:
    """Return the share of a core that a process uses."""
    before_s, began_s = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def _measure(pid: int, port: int, pages: int, rounds: int, seconds: float) -> str:
    """Return the cells of a row."""
    _Pages(port, pages, 12.0).close()  # until decisions have been sampled and beliefs written
    without, with_pages, read = [], [], []
    for _ in range(rounds):
        without.append(_turn(pid, seconds))
        opened = _Pages(port, pages, seconds + 1.0)
        with_pages.append(_turn(pid, seconds))
        read.append(opened.close())
    costs = [after - before for before, after in zip(without, with_pages, strict=True)]
    snapshots = sum(each["snapshots"] for each in read)
    rate = snapshots / (rounds * (seconds + 1.0) * pages)
    size_kb = sum(each["bytes"] for each in read) / snapshots / 1e3
    error = statistics.stdev(costs) / math.sqrt(rounds)
    return (
        f"{statistics.mean(without):.2%} | {statistics.mean(with_pages):.2%} | "
        f"{statistics.mean(costs):.2%} ± {error:.2%} | {rate:.2f} | {size_kb:.0f}"
    )


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--streams", type=int, default=32, help="of the load, a chunk each 20 ms")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        folder, behind, port = Path(name), free_port(), free_port()
        env = {"UPSTREAM": str(behind), "XDG_STATE_HOME": str(folder / "state")}
        load_env = {"CHUNKS": str(_CHUNKS), "INTERVAL_S": str(_INTERVAL_S)}
        command = [sys.executable, "-m", "gateway", "--config", str(_POOL), "--port", str(port)]
        log = folder / "gateway.log"
        with upstream(behind, folder, load_env), running(command, {SYSTEM_CPU}, log, env) as pid:
            until_answered(port, (), log)
            print(f"| load | CPU, no page | CPU, {arguments.pages} pages | cost | snapshots/s a page | kB a snapshot |")
            print("|---|---|---|---|---|---|")
            loading = [sys.executable, "-m", "benchmarks.overhead.load", str(port), str(arguments.streams)]
            loading += ["600", "2000", "--stream", "--header", "x-gateway-workload: chat"]
            label = f"{arguments.streams} streams, a chunk each {1e3 * _INTERVAL_S:.0f} ms"
            with running(loading, {LOAD_CPU}, folder / "load.log"):
                time.sleep(5.0)  # until all streams are open, and the models have been fitted
                print(f"| {label} | {_measure(pid, port, arguments.pages, arguments.rounds, arguments.seconds)} |")
            until_idle(pid)
            print(f"| none | {_measure(pid, port, arguments.pages, arguments.rounds, arguments.seconds)} |")


if __name__ == "__main__":
    main()
