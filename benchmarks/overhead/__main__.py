"""`python -m benchmarks.overhead`: CPU per request and per chunk, added latency, memory, of each system in turn.

Two cores: the system under test has the first, upstream and load the second. CPU is user and system time of the
system's whole process tree over the requests (or chunks) that the upstream sent: it hangs less on a noisy machine than
any latency does. Each cell is the median of ROUNDS rounds, the systems in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backends.ports import free_port
from benchmarks.overhead.systems import SYSTEMS, System

_SYSTEM_CPU, _LOAD_CPU = 0, 1
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load."""

    name: str
    connections: int
    body_bytes: int
    stream: bool = False
    seconds: float = 4.0


LOADS = (
    Load("2 KB, 1 connection", 1, 2_000, seconds=3.0),
    Load("2 KB, 64 connections", 64, 2_000),
    Load("32 KB, 64 connections", 64, 32_000),
    Load("streams, 256 connections", 256, 2_000, stream=True, seconds=6.0),
)


@dataclass(slots=True)
class Cell:
    """What the rounds of one system under one load gave."""

    cpu_us: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    errors: int = 0


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = [pid], [pid]
    while left:
        for child in children.get(left.pop(), []):
            found.append(child)
            left.append(child)
    return found


def _cpu_s(pid: int) -> float:
    total = 0
    for one in _tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def _rss_mb(pid: int) -> float:
    total = 0.0
    for one in _tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) / 1024
    return total


def _get(port: int, path: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    with urllib.request.urlopen(request, timeout=2) as answer:
        return bytes(answer.read())


def _stats(port: int) -> dict[str, int]:
    counts: dict[str, int] = json.loads(_get(port, "/stats"))
    return counts


@contextlib.contextmanager
def _running(argv: list[str], cpu: int, log: Path) -> Iterator[int]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),  # noqa: PLW1509 -- there is one thread here
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _load(load: Load, port: int, headers: tuple[str, ...], seconds: float) -> dict[str, object]:
    argv = [
        *(sys.executable, "-m", "benchmarks.overhead.load", str(port), str(load.connections), str(seconds)),
        str(load.body_bytes),
        *(["--stream"] if load.stream else []),
        *(part for header in headers for part in ("--header", header)),
    ]
    done = subprocess.run(
        argv, capture_output=True, check=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {_LOAD_CPU})
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def _until_ready(port: int) -> None:
    end_s = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError):
            _get(port, "/stats")
            return
        if time.monotonic() > end_s:
            raise SystemExit(f"nothing answers on port {port}")
        time.sleep(0.1)


def _measure(system: System | None, load: Load, cell: Cell, folder: Path) -> bool:
    """Run one round; False if the system is not installed. None measures the upstream alone."""
    upstream = free_port()
    argv = [sys.executable, "-m", "benchmarks.overhead.upstream", str(upstream)]
    with _running(argv, _LOAD_CPU, folder / "upstream.log"):
        _until_ready(upstream)
        if system is None:
            _note(cell, load, _load(load, upstream, (), load.seconds))
            return True
        port = free_port()
        command = system.argv(port, upstream, folder)
        if command is None:
            return False
        with _running(command, _SYSTEM_CPU, folder / "system.log") as pid:
            _until_answered(port, system.headers)
            _load(load, port, system.headers, 1.0)
            before, cpu_s = _stats(upstream), _cpu_s(pid)
            result = _load(load, port, system.headers, load.seconds)
            after, spent_s = _stats(upstream), _cpu_s(pid) - cpu_s
            what = "chunks" if load.stream else "requests"
            cell.cpu_us.append(1e6 * spent_s / max(1, after[what] - before[what]))
            cell.rss_mb.append(_rss_mb(pid))
            _note(cell, load, result)
    return True


def _until_answered(port: int, headers: tuple[str, ...]) -> None:
    """Wait until a chat request is answered: the proxy is up, and has let its upstream in."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    named = {"content-type": "application/json", **dict(header.split(": ", 1) for header in headers)}
    end_s = time.monotonic() + _START_S
    while True:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers=named)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > end_s:
            raise SystemExit(f"no chat request is answered on port {port}")
        time.sleep(0.1)


def _note(cell: Cell, load: Load, result: dict[str, object]) -> None:
    times = result["chunk_delay_ms" if load.stream else "latency_ms"]
    assert isinstance(times, dict)
    cell.requests_per_s.append(float(str(result["requests_per_s"])))
    cell.p50_ms.append(times.get("p50", float("nan")))
    cell.p99_ms.append(times.get("p99", float("nan")))
    cell.errors += int(str(result["errors"]))


def main() -> None:
    """Measure all systems in turns and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="part of a system's name; may be given again")
    given = parser.parse_args()
    chosen = [one for one in SYSTEMS if not given.only or any(part in one.name for part in given.only)]
    cells: dict[tuple[str, str], Cell] = {}
    missing: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        for _ in range(given.rounds):
            for load in LOADS:
                for system in (None, *chosen):
                    label = system.name if system else "none (upstream alone)"
                    cell = cells.setdefault((load.name, label), Cell())
                    if not _measure(system, load, cell, Path(name)):
                        missing.add(label)
    for load in LOADS:
        alone = cells[load.name, "none (upstream alone)"]
        unit = "chunk" if load.stream else "request"
        print(f"\n### {load.name}\n")
        print(f"| system | CPU us/{unit} | requests/s | p50 ms | p99 ms | added p50 | added p99 | RSS MB | errors |")
        print("|---|---|---|---|---|---|---|---|---|")
        for (cell_load, label), cell in cells.items():
            if cell_load != load.name or label in missing:
                continue
            middle = {key: statistics.median(getattr(cell, key) or [0.0]) for key in Cell.__slots__ if key != "errors"}
            added = [middle[key] - statistics.median(getattr(alone, key)) for key in ("p50_ms", "p99_ms")]
            print(
                f"| {label} | {middle['cpu_us']:.1f} | {middle['requests_per_s']:.0f} | {middle['p50_ms']:.2f} | "
                f"{middle['p99_ms']:.2f} | {added[0]:.2f} | {added[1]:.2f} | {middle['rss_mb']:.0f} | {cell.errors} |"
            )
    for label in sorted(missing):
        print(f"\nNot installed: {label}")


if __name__ == "__main__":
    main()
