import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.launch.ports import free_port
from backends.launch.supervisor import Launcher, LaunchError, LaunchSpec, LaunchState, SupervisedEngine, _rotate
from tests.support.paths import ROOT
from tests.support.waiting import eventually, eventually_blocking

ENGINE = Path(__file__).with_name("child.py")


class Bench:
    """Engine specs whose processes can be identified, and the events that the launcher reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"LAUNCH_TEST={uuid.uuid4().hex}"
        self.events: list[str] = []

    def spec(self, *flags: str, port: int | None = None, serves: bool = True, **changes: float) -> LaunchSpec:
        port = port or free_port()
        return LaunchSpec(
            name="tiny/ngram",
            argv=(sys.executable, str(ENGINE), "--port", str(port if serves else 0), *flags),
            health_urls=(f"http://127.0.0.1:{port}/health",),
            env={"ENGINE_WORD": "hello", **dict([self.mark.split("=")])},
            log_path=self.folder / "logs" / "engine.log",
            **changes,
        )

    def processes(self) -> set[int]:
        """Return the ids of all running processes of this bench's engines, including those that watch."""
        pids = set()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    pids.add(int(folder.name))
        return pids

    @asynccontextmanager
    async def running(self, *specs: LaunchSpec) -> AsyncIterator[Launcher]:
        launcher = Launcher(specs, lambda _name, text: self.events.append(text))
        await launcher.start()
        try:
            yield launcher
        finally:
            await launcher.stop()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("backends.launch.supervisor.GROUP_END_S", 0.5)
    bench = Bench(tmp_path)
    yield bench
    with contextlib.suppress(AssertionError):  # some end a moment later on a busy machine
        eventually_blocking(lambda: not bench.processes(), 20.0)
    left = bench.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left running"


def only(launcher: Launcher) -> SupervisedEngine:
    [engine] = launcher.engines
    return engine


def pid_of(launcher: Launcher) -> int:
    pid = only(launcher).pid
    assert pid is not None
    return pid


async def test_an_engine_becomes_ready_and_stops(bench: Bench) -> None:
    spec = bench.spec()
    async with bench.running(spec) as launcher:
        await launcher.wait_ready(10)
        status = only(launcher)
        assert (status.spec.name, status.state, status.restarts, status.last_exit) == ("tiny/ngram", "ready", 0, None)
        assert pid_of(launcher) in bench.processes()
        started = time.monotonic()
    assert time.monotonic() - started < 20  # well before the timeout of 25 s
    status = only(launcher)
    assert (status.state, status.pid, status.last_exit) == ("stopped", None, "exit status 0")
    assert spec.log_path.read_text().splitlines()[:1] == ["engine says hello"]
    assert "engine ends" in spec.log_path.read_text()
    await launcher.stop()  # a second call is allowed


@pytest.mark.slow
async def test_an_engine_that_dies_is_restarted_without_its_descendants_and_its_shared_memory(bench: Bench) -> None:
    shared = f"launch-test-{uuid.uuid4().hex}"
    async with bench.running(bench.spec("--family", "--share", shared)) as launcher:
        await launcher.wait_ready(10)
        first, family = pid_of(launcher), bench.processes()
        assert len(family) == 4  # the engine, its child, its orphan, and what Python tracks shared memory by
        assert shared in os.listdir("/dev/shm")
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: only(launcher).state is LaunchState.BACKOFF)
        assert shared not in os.listdir("/dev/shm")
        await eventually(lambda: not family & bench.processes())  # a busy machine ends them a moment after SIGKILL
        await launcher.wait_ready(10)
        assert pid_of(launcher) != first
        assert (only(launcher).restarts, only(launcher).last_exit) == (1, "killed by SIGKILL")
    assert "killed by SIGKILL; restarting in 0.5 s" in bench.events


@pytest.mark.slow
async def test_an_engine_that_cannot_be_watched_is_not_left_running(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def without_shell(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        if argv[0] == "/bin/sh":
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*argv, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", without_shell)
    async with bench.running(bench.spec()) as launcher:
        await eventually(lambda: only(launcher).state is LaunchState.BACKOFF)
        assert "temporarily unavailable" in str(only(launcher).last_exit)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await launcher.wait_ready(20)  # its port is free
        assert len(bench.processes()) == 1
    assert not any("in use" in event for event in bench.events)


@pytest.mark.slow
async def test_the_log_of_an_engine_that_prints_without_end_is_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.launch.supervisor.LOG_CHECK_S", 0.05)
    monkeypatch.setattr("backends.launch.supervisor.LOG_BYTES", 20_000)
    spec = bench.spec("--chatter")
    before = spec.log_path.with_name("engine.log.1")
    async with bench.running(spec) as launcher:
        await eventually(before.exists)
        moved = before.stat().st_mtime_ns
        await eventually(lambda: before.stat().st_mtime_ns != moved, what="it is begun anew again")
        await eventually(lambda: spec.log_path.read_bytes().startswith(b"line "), what="the engine goes on at the end")
        assert only(launcher).restarts == 0
        spec.log_path.unlink()
        _rotate(spec.log_path)  # does not raise


@pytest.mark.slow
async def test_the_pauses_between_restarts_double(bench: Bench) -> None:
    async with bench.running(bench.spec("--fail")):
        await eventually(lambda: any("restarting in 2 s" in event for event in bench.events))
    pauses = [event for event in bench.events if "restarting" in event]
    assert pauses == [f"exit status 3; restarting in {pause_s} s" for pause_s in ("0.5", "1", "2")]


@pytest.mark.slow
async def test_an_engine_that_ignores_sigterm_is_killed_with_its_descendants(bench: Bench) -> None:
    async with bench.running(bench.spec("--ignore-term", "--family", shutdown_timeout_s=0.5)) as launcher:
        await launcher.wait_ready(10)
        started = time.monotonic()
    assert 0.4 < time.monotonic() - started < 20
    assert only(launcher).last_exit == "killed by SIGKILL"
    await eventually(lambda: not bench.processes())  # which a busy machine ends some milliseconds after SIGKILL


@pytest.mark.slow
async def test_an_engine_that_never_becomes_ready_is_killed_and_restarted(bench: Bench) -> None:
    spec = bench.spec(serves=False, startup_timeout_s=0.6)
    async with bench.running(spec) as launcher:
        with pytest.raises(LaunchError, match=r"(?s)not ready after 1.5 s:.*tiny/ngram: .*engine says hello"):
            await launcher.wait_ready(1.5)
        await eventually(lambda: only(launcher).restarts >= 1)
    assert any(event.startswith("killed because it was not ready after 0.6 s; restarting") for event in bench.events)


async def test_stopping_an_engine_that_still_starts_is_fast(bench: Bench) -> None:
    async with bench.running(bench.spec("--ignore-term", serves=False)) as launcher:
        await eventually(lambda: only(launcher).pid is not None)
        started = time.monotonic()
    assert time.monotonic() - started < 20


@pytest.mark.slow
async def test_a_port_in_use_by_another_process_is_not_shared(bench: Bench) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        port = other.getsockname()[1]
        async with bench.running(bench.spec(port=port)) as launcher:
            await eventually(lambda: only(launcher).state is LaunchState.BACKOFF)
            assert only(launcher).last_exit == f"port {port} is in use by another process"
            assert not bench.processes()
            other.close()
            await launcher.wait_ready(10)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("no-such-command", "give its path in serve.command"),
        ("vllm", "pip install '.[vllm]' in a checkout (deploy/README.md#install), or give its path in serve.command"),
    ],
)
async def test_a_missing_command_is_reported_before_any_engine_starts(bench: Bench, command: str, hint: str) -> None:
    good = bench.spec()
    missing = LaunchSpec("tiny/eagle", (command,), good.health_urls, {"PATH": "/nowhere"}, good.log_path)
    launcher = Launcher([good, missing])
    with pytest.raises(LaunchError, match=re.escape(f"tiny/eagle: command not found: '{command}'; {hint}")):
        await launcher.start()
    assert not bench.processes()


@pytest.mark.slow
async def test_no_process_survives_when_the_gateway_is_killed(bench: Bench) -> None:
    spec = bench.spec("--ignore-term", "--family")
    program = (
        "import asyncio\n"
        "from pathlib import PosixPath\n"
        "from backends.launch.supervisor import Launcher, LaunchSpec\n"
        "async def main():\n"
        f"    launcher = Launcher([{spec!r}])\n"
        "    await launcher.start()\n"
        "    await launcher.wait_ready(10)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert gateway.stdout is not None
    assert await asyncio.wait_for(gateway.stdout.readline(), 20) == b"ready\n"
    assert len(bench.processes()) == 3
    gateway.kill()
    await gateway.wait()
    await eventually(lambda: not bench.processes())


@pytest.mark.slow
async def test_an_engine_whose_spec_changes_is_started_anew_and_the_others_are_not(bench: Bench) -> None:
    spec = bench.spec()
    other = replace(bench.spec(), name="tiny/other")
    async with bench.running(spec, other) as launcher:
        await launcher.wait_ready()
        first, second = launcher.engines
        before, stays = first.pid, second.pid
        changed = replace(spec, env={**spec.env, "ENGINE_WORD": "anew"})
        launcher.change([changed, other])
        await eventually(lambda: first.ready.is_set() and first.pid not in {before, None})
        assert second.pid == stays
        assert "engine says anew" in spec.log_path.read_text()
        launcher.change([spec, other])
        await eventually(lambda: not first.ready.is_set())
        launcher.change([changed, other])  # before that has ended: the last one counts
        await eventually(lambda: first.spec == changed and first.ready.is_set())
        launcher.change([spec])
        await launcher.stop()
    await eventually(lambda: not bench.processes())
    assert first.pid is None
