"""Replicas as processes: started, told to fail, killed, frozen, and asked what they have done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from backends.launch.ports import free_port
from benchmarks.faults.engine import LOOK
from benchmarks.systems import HOSTS

_ROOT = Path(__file__).parents[2]


class ReplicaProcess:
    """One replica (`benchmarks.faults.engine`) at an address of its own."""

    def __init__(self, host: str, port: int, log: Path) -> None:
        self.host = host
        self.port = port
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        argv = ["-m", "benchmarks.faults.engine", self.host, str(self.port), str(self.log)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            cwd=_ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise SystemExit(f"a replica did not start at {self.host}:{self.port}")

    async def tell(self, fault: str) -> dict[str, int]:
        """Begin with a fault, or end it; return the replica's counts."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{fault}\n".encode())
        counts: dict[str, int] = json.loads(await self._process.stdout.readline())
        return counts

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            await self._process.wait()
            self._process = None


class Replicas:
    """Replicas on one port, at several addresses."""

    def __init__(self, folder: Path, hosts: Iterable[str] = HOSTS) -> None:
        self.port = free_port()
        self.each = [ReplicaProcess(host, self.port, folder / f"replica-{host}.log") for host in hosts]

    async def start(self) -> None:
        """Start all."""
        await asyncio.gather(*(replica.start() for replica in self.each))

    async def stop(self) -> None:
        """Kill all."""
        await asyncio.gather(*(replica.kill() for replica in self.each))

    async def running(self) -> int:
        """Return the number of requests that run."""
        return sum([(await replica.tell(LOOK))["running"] for replica in self.each])

    def journal(self) -> Journal:
        """Return what all have done."""
        return Journal([line for replica in self.each for line in _lines(replica.log)])


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


class Journal:
    """What replicas have written about the requests that they ran."""

    def __init__(self, lines: list[str]) -> None:
        entries = [line.split() for line in lines]
        self.begun = Counter(request_id for event, request_id, _ in entries if event == "begin")
        self.ended = Counter(request_id for event, request_id, _ in entries if event == "end")

    def run_twice(self) -> list[str]:
        """Return the requests that were answered to their end more than once."""
        return [request_id for request_id, count in self.ended.items() if count > 1]


def last_end_s(replica: ReplicaProcess) -> float:
    """Return the monotonic time of the last request that a replica answered to its end; 0 if there is none."""
    ends = [float(line.split()[2]) for line in _lines(replica.log) if line.startswith("end")]
    return max(ends, default=0.0)
