"""New gateways that take over from old ones under streams, one after another; counted by the clients."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backends.launch.ports import free_port
from benchmarks.faults.asking import Work
from benchmarks.faults.load import REFUSED, UNANSWERED, Ask, Load, Tally, numbers
from benchmarks.faults.replicas import Replicas
from benchmarks.faults.stage import until
from benchmarks.faults.systems import Site, gateway

_START_S, _END_S = 120.0, 90.0
_ALONE_S = 1.0
"""What each gateway serves alone before the next one starts."""
_BECOME = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.dup2(int(sys.argv[1]), 3)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes a gateway, as a process that systemd starts does."""


@dataclass(slots=True)
class Takeovers:
    """What has been counted.

    Parameters
    ----------
    refused
        Requests whose connection was refused or ended before an answer.
    lost
        Answers that were begun and not completed, or failed.
    handed_over
        Streams that were open when their gateway was told to end.
    """

    times: int = 0
    streams: int = 0
    refused: int = 0
    lost: int = 0
    handed_over: int = 0
    examples: dict[str, str] = field(default_factory=dict)


def _streams(seed: int) -> Iterator[Ask]:
    """Yield streams without end, of 0.2 to 3 seconds."""
    rng = random.Random(seed)
    for number in numbers:
        yield Ask(Work(number, rng.randint(20, 300), 0, is_chat=True, is_stream=True))


class _Gateways:
    """The old gateway and the new one at one port: by `server.reuse_port`, or of a socket that both are passed."""

    def __init__(self, site: Site, passed: socket.socket | None, workers: int) -> None:
        sharing = {} if passed else {"reuse_port": True}
        server = {"drain_s": 30, "workers": workers, **sharing}
        quick = {"interval_s": 0.2, "timeout_s": 2.0}
        self._argv = gateway(site, "least_loaded", state="none", server=server, health=quick)
        self._folder, self._passed = site.folder, passed
        self._count = 0
        self.all: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        """Start the next gateway, and wait until it listens."""
        log = self._folder / f"gateway-{self._count}.log"
        self._count += 1
        new = self._spawned(log)
        self.all.append(new)
        await until(lambda: new.poll() is not None or b"Listening at" in log.read_bytes(), _START_S)
        if b"Listening at" not in log.read_bytes():
            raise RuntimeError(f"the gateway does not start:\n{log.read_text()}")

    def _spawned(self, log: Path) -> subprocess.Popen[bytes]:
        argv, env, passed = self._argv, dict(os.environ), self._passed
        if passed is not None:
            env["LISTEN_FDS"] = "1"
            argv = [sys.executable, "-c", _BECOME, str(passed.fileno()), *argv]
        fds = [] if passed is None else [passed.fileno()]
        with log.open("wb") as output:
            return subprocess.Popen(argv, stdout=output, stderr=output, env=env, pass_fds=fds, start_new_session=True)

    def end(self) -> None:
        """Send SIGTERM to the oldest gateway."""
        self.all[0].send_signal(signal.SIGTERM)

    async def until_ended(self) -> None:
        """Wait until the oldest has ended."""
        old = self.all[0]
        if not await until(lambda: old.poll() is not None, _END_S):
            raise RuntimeError("the old gateway does not end")
        self.all.pop(0)

    def kill(self) -> None:
        """Kill what is left."""
        for each in self.all:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


async def takeover(
    times: int, rate_per_s: float, *, passes: bool = False, workers: int = 1, seed: int = 1
) -> Takeovers:
    """Hand open streams from one gateway to the next, and count what their clients see."""
    found = Takeovers()
    with tempfile.TemporaryDirectory(prefix="takeover-") as name:
        folder = Path(name)
        replicas = Replicas(folder)
        passed = socket.create_server(("127.0.0.1", 0), backlog=2048) if passes else None
        port = passed.getsockname()[1] if passed else free_port()
        gateways = _Gateways(Site(port, replicas.port, folder, folder), passed, workers)
        await replicas.start()
        try:
            await gateways.start()
            load = Load(port)
            async with load.steady(_streams(seed), rate_per_s):
                for _ in range(times):
                    await asyncio.sleep(_ALONE_S)
                    await _take_over(gateways, load, found)
            _count(await load.finish(), found)
        finally:
            gateways.kill()
            await replicas.stop()
            if passed is not None:
                passed.close()
    return found


async def _take_over(gateways: _Gateways, load: Load, found: Takeovers) -> None:
    began_s = time.monotonic()
    await gateways.start()
    listening_s = time.monotonic()
    gateways.end()
    found.handed_over += len(load.pending)
    found.times += 1
    open_streams = len(load.pending)
    await gateways.until_ended()
    ended_s = time.monotonic()
    print(
        f"takeover {found.times}: the new one listens after {listening_s - began_s:.1f} s; {open_streams} streams "
        f"open, the old one ended {ended_s - listening_s:.1f} s later; {load.sent} sent, "
        f"failed {load.tally.examples() or 0}",
        flush=True,
    )


def _count(tally: Tally, found: Takeovers) -> None:
    failures = tally.failures()
    found.streams = len(tally.outcomes)
    found.refused = sum(failures[what] for what in (REFUSED, UNANSWERED))
    found.lost = sum(failures.values()) - found.refused
    found.examples = tally.examples()


def line(found: Takeovers) -> str:
    """Return the figures in a line."""
    said = f"{found.times} takeovers, {found.streams} streams, {found.handed_over} of them open at one: "
    return f"{said}{found.refused} refused, {found.lost} lost" + "".join(f"\n{each}" for each in found.examples.items())
