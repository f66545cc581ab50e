"""A gateway that takes over from another under streams, without a refused connection and without a lost stream."""

from __future__ import annotations

import os
import random
import signal
import subprocess
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


def streams() -> Iterator[Ask]:
    """Yield streams without end, of 0.2 to 3 seconds."""
    rng = random.Random(1)
    for number in numbers:
        yield Ask(Work(number, rng.randint(20, 300), 0, is_chat=True, is_stream=True))


async def listening(site: Site, name: str) -> subprocess.Popen[bytes]:
    """Start a gateway at the port of others."""
    server = {"drain_s": 30, "workers": 2, "reuse_port": True}
    quick = {"interval_s": 0.2, "timeout_s": 2.0}
    log = site.folder / name
    process = spawned(gateway(site, "least_loaded", state="none", server=server, health=quick), log)
    await until(lambda: process.poll() is not None or b"Listening at" in log.read_bytes(), START_S)
    assert b"Listening at" in log.read_bytes(), log.read_text()
    return process


async def test_a_takeover_refuses_no_connection_and_loses_no_stream(tmp_path: Path) -> None:
    replicas, gateways, port = Replicas(tmp_path), list[subprocess.Popen[bytes]](), free_port()
    site = Site(port, replicas.port, tmp_path, HOSTS)
    await replicas.start()
    try:
        gateways.append(old := await listening(site, "old.log"))
        load = Load(port)
        async with load.steady(streams(), 25.0):
            assert await until(lambda: len(load.tally.outcomes) > 5, START_S)
            gateways.append(await listening(site, "new.log"))
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
