"""A gateway that takes over from another under streams, without a refused connection and without a lost stream."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.launch.ports import free_port
from benchmarks.faults.asking import Work
from benchmarks.faults.load import Ask, Load, numbers
from benchmarks.faults.replicas import Replicas
from benchmarks.faults.stage import until
from benchmarks.faults.systems import gateway
from benchmarks.process import spawned
from benchmarks.systems import HOSTS, Site

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

START_S, END_S = 120.0, 90.0
BECOME = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.dup2(int(sys.argv[1]), 3)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes a gateway, as a process that systemd starts does."""


def streams() -> Iterator[Ask]:
    """Yield streams without end, of 0.2 to 3 seconds."""
    rng = random.Random(1)
    for number in numbers:
        yield Ask(Work(number, rng.randint(20, 300), 0, is_chat=True, is_stream=True))


async def listening(site: Site, name: str, passed: socket.socket | None) -> subprocess.Popen[bytes]:
    """Start a gateway at the port of others: by `server.reuse_port`, or of a socket that all are passed."""
    server = {"drain_s": 30, "workers": 2, **({} if passed else {"reuse_port": True})}
    quick = {"interval_s": 0.2, "timeout_s": 2.0}
    argv, log = gateway(site, "least_loaded", state="none", server=server, health=quick), site.folder / name
    if passed is None:
        process = spawned(argv, log)
    else:
        argv = [sys.executable, "-c", BECOME, str(passed.fileno()), *argv]
        process = spawned(argv, log, {"LISTEN_FDS": "1"}, pass_fds=[passed.fileno()])
    await until(lambda: process.poll() is not None or b"Listening at" in log.read_bytes(), START_S)
    assert b"Listening at" in log.read_bytes(), log.read_text()
    return process


@pytest.mark.parametrize("passes", [False, True])
async def test_a_takeover_refuses_no_connection_and_loses_no_stream(tmp_path: Path, passes: bool) -> None:
    replicas, gateways = Replicas(tmp_path), list[subprocess.Popen[bytes]]()
    passed = socket.create_server(("127.0.0.1", 0), backlog=2048) if passes else None
    port = passed.getsockname()[1] if passed else free_port()
    site = Site(port, replicas.port, tmp_path, HOSTS)
    await replicas.start()
    try:
        gateways.append(old := await listening(site, "old.log", passed))
        load = Load(port)
        async with load.steady(streams(), 25.0):
            assert await until(lambda: len(load.tally.outcomes) > 5, START_S)
            gateways.append(await listening(site, "new.log", passed))
            old.send_signal(signal.SIGTERM)
            assert load.pending
            assert await until(lambda: old.poll() is not None, END_S)
        tally = await load.finish()
        assert not tally.failures(), tally.examples()
    finally:
        for each in gateways:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
        await replicas.stop()
        if passed is not None:
            passed.close()
