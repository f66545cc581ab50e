"""Measurement of one system under one kind of load: CPU, latency, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.launch.ports import free_port
from benchmarks.process import (
    SYSTEM_CPU,
    cpu_s,
    load,
    records_left_out,
    rss_mb,
    stats,
    tree,
    until_idle,
    upstream,
)
from benchmarks.systems import System, started


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load.

    Parameters
    ----------
    chunk_interval_s
        Interval of a stream's chunks; without one, answers come in one piece.
    """

    name: str
    connections: int
    body_bytes: int = 2_000
    chunk_interval_s: float | None = None
    seconds: float = 4.0

    @property
    def is_streamed(self) -> bool:
        """Whether answers are streams."""
        return self.chunk_interval_s is not None

    @property
    def env(self) -> dict[str, str]:
        """Environment of the upstream for this load."""
        return {"INTERVAL_S": str(self.chunk_interval_s or 0.0)}


LOADS = (
    Load("2 KB, 64 connections", 64),
    Load("32 KB, 64 connections", 64, 32_000),
    Load("256 streams, a chunk each 5 ms", 256, chunk_interval_s=0.005, seconds=6.0),
)


@dataclass(slots=True)
class Cell:
    """Results of the rounds of one system under one load."""

    cpu_us: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    left_out: list[float] = field(default_factory=list)
    errors: int = 0

    def add(self, kind: Load, result: dict[str, Any]) -> None:
        """Add the results of the load generator."""
        times = result["chunk_delay_ms" if kind.is_streamed else "latency_ms"]
        self.requests_per_s.append(result["requests_per_s"])
        self.p50_ms.append(times.get("p50", float("nan")))
        self.p99_ms.append(times.get("p99", float("nan")))
        self.errors += result["errors"]


def measure(system: System | None, kind: Load, cell: Cell, folder: Path) -> None:
    """Run one round; `None` measures the upstream alone."""
    behind, arguments = free_port(), {"body_bytes": kind.body_bytes, "stream": kind.is_streamed}
    with upstream(behind, folder, kind.env):
        if system is None:
            cell.add(kind, load(behind, kind.connections, kind.seconds, **arguments))
            return
        with started(system, behind, folder, {SYSTEM_CPU}) as (port, pid):
            until_idle(pid)
            load(port, kind.connections, 1.0, **arguments, headers=system.headers)
            before, pids = stats(behind), tree(pid)
            spent_s = -cpu_s(pids)
            result = load(port, kind.connections, kind.seconds, **arguments, headers=system.headers)
            after = stats(behind)
            spent_s += cpu_s(pids)
            what = "chunks" if kind.is_streamed else "requests"
            cell.cpu_us.append(1e6 * spent_s / max(1, after[what] - before[what]))
            cell.rss_mb.append(rss_mb(pids))
            cell.add(kind, result)
            if system.records:
                cell.left_out.append(records_left_out(port) / max(1, stats(behind)["requests"]))
