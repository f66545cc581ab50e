"""Replicas as processes: started, told to fail, killed, frozen, and asked what they have done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from backends.launch.ports import free_port
from benchmarks.faults.engine import LOOK

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

    async def counts(self) -> dict[str, int]:
        """Return what it has done so far, and does now."""
        return await self.tell(LOOK)

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
    """Four replicas on one port, at addresses 127.0.0.1 to 127.0.0.4."""

    def __init__(self, folder: Path, count: int = 4) -> None:
        self.port = free_port()
        self.each = [
            ReplicaProcess(f"127.0.0.{number}", self.port, folder / f"replica-{number}.log")
            for number in range(1, count + 1)
        ]

    async def start(self) -> None:
        """Start all."""
        await asyncio.gather(*(replica.start() for replica in self.each))

    async def stop(self) -> None:
        """Kill all."""
        await asyncio.gather(*(replica.kill() for replica in self.each))

    async def running(self) -> int:
        """Return the number of requests that run."""
        return sum([(await replica.counts())["running"] for replica in self.each])

    def times(self, event: str, request_id: str) -> dict[str, float]:
        """Return when each replica that had a request began or ended it, by host, in monotonic time."""
        lines = [(replica.host, line.split()) for replica in self.each for line in _lines(replica.log)]
        return {host: float(at_s) for host, (what, which, at_s) in lines if (what, which) == (event, request_id)}

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

    def sent_twice(self) -> list[str]:
        """Return the requests that were begun more than once."""
        return [request_id for request_id, count in self.begun.items() if count > 1]


def last_end_s(replica: ReplicaProcess) -> float:
    """Return the monotonic time of the last request that a replica answered to its end; 0 if there is none."""
    ends = [float(line.split()[2]) for line in _lines(replica.log) if line.startswith("end")]
    return max(ends, default=0.0)
