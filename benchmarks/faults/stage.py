"""A system before its replicas, with all that can be taken from it: its process, a Redis, its disk, its clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import httpx

from backends.launch.ports import free_port
from benchmarks.faults.asking import Work
from benchmarks.faults.load import ANSWERED, Ask, Load, numbers
from benchmarks.faults.replicas import Replicas
from benchmarks.metrics_page import total
from benchmarks.process import is_alive, rss_mb, spawned, tree
from benchmarks.systems import HOSTS, Site, System

_START_S, _STOP_S, _ORPHAN_S, _POLL_S = 90.0, 40.0, 5.0, 0.05
_DISK_MIB = 64


class NotStartedError(Exception):
    """A system does not answer after its start."""


class Redis:
    """A `redis-server` that can be killed and frozen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty."""
        argv = ["redis-server", "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = spawned([*argv, "--dir", str(self._folder)], self._folder / "redis.log")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it; what it has is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Disk:
    """A small disk that can be filled: a tmpfs or, where nothing may be mounted, a limit on the size of files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(self.path)]
        self.is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._filler = self.path / "filler"

    def fill(self, pids: list[int]) -> None:
        """Fill the disk, so that processes can write nothing more."""
        if not self.is_mounted:
            self._limit(pids, 0)
            return
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def free(self, pids: list[int]) -> None:
        """Free the disk again."""
        if self.is_mounted:
            self._filler.unlink(missing_ok=True)
        else:
            self._limit(pids, resource.RLIM_INFINITY)

    def _limit(self, pids: list[int], size_bytes: int) -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def close(self) -> None:
        """Unmount it."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


class Stage:
    """A running system and its replicas.

    Parameters
    ----------
    env
        Variables of the system's environment.

    Attributes
    ----------
    victim
        The replica that has the next fault.
    orphans
        Processes that were left when the system had ended, over all its ends.
    """

    def __init__(self, system: System, folder: Path, env: dict[str, str] | None = None) -> None:
        self.system = system
        self.replicas = Replicas(folder, system.hosts)
        self.victim = self.replicas.each[0]
        self.redis = Redis(folder)
        self.disk = Disk(folder)
        self.site = Site(free_port(), self.replicas.port, folder, HOSTS, self.disk.path, self.redis.url)
        self.log = folder / "system.log"
        self.orphans = 0
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Return the port of the system."""
        return self.site.port

    @property
    def pids(self) -> list[int]:
        """Return the processes of the system."""
        return [] if self._process is None else tree(self._process.pid)

    async def __aenter__(self) -> Stage:
        """Start all; raises `FileNotFoundError` if the system is not installed."""
        await self.replicas.start()
        if self.system.has_state:
            self.redis.start()
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all."""
        await self.stop()
        await self.replicas.stop()
        self.redis.kill()
        self.disk.close()

    async def start(self) -> None:
        """Start the system, and wait until it answers through every replica."""
        self._process = spawned(self.system.command(self.site), self.log, self._env)
        end_s = time.monotonic() + _START_S
        answered = 0
        while answered < 16:
            load = Load(self.port)
            for number in islice(numbers, 8):
                load.send(Ask(Work(number, 2)))
            answered += (await load.finish()).count(ANSWERED)
            if time.monotonic() > end_s or not self.is_alive():
                raise NotStartedError(f"{self.system.name} does not answer:\n{self.log.read_text()[-2000:]}")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """End the system, after the requests that it has."""
        if self._process is None:
            return
        self.signal(self.system.stops_with)
        await until(lambda: not self.is_alive(), _STOP_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill the system's first process, and count what is left of it a moment later."""
        assert self._process is not None
        pids = self.pids
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        await until(lambda: not any(map(is_alive, pids)), _ORPHAN_S)
        left = [pid for pid in pids if is_alive(pid)]
        self.orphans += len(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send the system a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def is_alive(self) -> bool:
        """Return whether the system runs."""
        return self._process is not None and self._process.poll() is None

    def rss_mb(self) -> float:
        """Return the resident memory of the system."""
        return rss_mb(self.pids)

    def open_files(self) -> int:
        """Return the number of files that the system has open."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)

    async def metrics(self) -> str:
        """Return the gateway's metrics page."""
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
            return (await client.get(f"http://127.0.0.1:{self.port}/metrics")).text

    async def counted(self, series: str, **labels: str) -> float:
        """Return the sum of a series of the gateway, over the samples that have some labels."""
        return total(await self.metrics(), series, **labels)

    async def in_flight(self) -> float:
        """Return the requests in flight as the gateway and the replicas count them."""
        own = await self.counted("gateway_in_flight") if self.system.name.startswith("gateway") else 0.0
        return own + await self.replicas.running()

    async def until_idle(self, longest_s: float) -> float | None:
        """Wait until nothing is in flight; return how long that took, None if it took longer."""
        began_s = time.monotonic()
        while await self.in_flight():
            if time.monotonic() - began_s > longest_s:
                return None
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began_s


async def until(condition: Callable[[], bool], longest_s: float) -> bool:
    """Wait until a condition holds, for at most `longest_s` seconds; return whether it does."""
    end_s = time.monotonic() + longest_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
