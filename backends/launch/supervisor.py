"""Starts, supervises and stops the engines that the gateway runs itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from backends import background
from backends.files.own_folder import make_own
from backends.launch.ports import port_is_free
from backends.reported import printable

GROUP_END_S = 5.0
"""Seconds after the end of an engine's first process until its other processes are killed."""

_POLL_S = 0.02
_KILL_GROUP = 'read _; kill -s KILL -- "-$1"'
"""Shell command that kills a process group once its input closes, which means that the gateway has ended."""


FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
BACKOFF_RESET_S = 60.0  # after being ready this long, an engine restarts with the first backoff
HEALTH_INTERVAL_S = 0.25
HEALTH_TIMEOUT_S = 2.0
UNREADY_SHUTDOWN_S = 2.0  # vLLM may ignore SIGTERM while it starts, and has no requests to finish then
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 8192
LOG_CHECK_S = 10.0
LOG_BYTES = 64 << 20  # size at which a log is rotated; the previous one is kept


class EngineProcess:
    """A running command, the first process of its group."""

    def __init__(self, engine: Process, watcher: Process) -> None:
        self.pid = engine.pid
        self._engine = engine
        self._watcher = watcher  # ends the group however this process ends

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> EngineProcess:
        """Start a command, and append its output to a file."""
        make_own(log_path.parent)
        with log_path.open("ab") as log:
            engine = await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        watch = ["/bin/sh", "-c", _KILL_GROUP, "sh", str(engine.pid)]
        try:
            watcher = await asyncio.create_subprocess_exec(*watch, stdin=subprocess.PIPE, start_new_session=True)
        except BaseException:  # nothing would track the engine, which holds the port and the GPU
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            raise
        return cls(engine, watcher)

    async def wait(self) -> int:
        """Wait for the engine and its process group to end; return its exit status."""
        status = await self._engine.wait()
        await self._end_group()
        self._watcher.kill()
        await self._watcher.wait()
        return status

    def terminate(self) -> None:
        """Ask the engine to end."""
        with contextlib.suppress(ProcessLookupError):
            self._engine.terminate()

    def kill(self) -> None:
        """Kill the engine; `wait` ends the rest of its group."""
        with contextlib.suppress(ProcessLookupError):
            self._engine.kill()

    async def _end_group(self) -> None:
        """End what the engine left in its group, first by SIGTERM, on which some processes remove shared memory."""
        end_s = time.monotonic() + GROUP_END_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
            while time.monotonic() < end_s:
                await asyncio.sleep(_POLL_S)
                os.killpg(self.pid, 0)
            os.killpg(self.pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """Return an exit status in words.

    Examples
    --------
    >>> describe_exit(-9), describe_exit(3)
    ('killed by SIGKILL', 'exit status 3')
    """
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class LaunchError(Exception):
    """An engine could not start or did not become ready; the message ends with the last lines of its log."""


class LaunchState(StrEnum):
    """Life cycle of a supervised engine."""

    STARTING = "starting"  # running, but not yet healthy
    READY = "ready"
    BACKOFF = "backoff"  # ended; waiting to restart
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One engine to run."""

    name: str  # name in logs, such as `tiny/ngram`
    argv: tuple[str, ...]  # the command and its arguments; a command without a slash is looked up on PATH
    health_urls: tuple[str, ...]  # URLs that must all answer 200 for the engine to be ready
    env: Mapping[str, str]  # variables added to the inherited environment
    log_path: Path  # file to which its standard output and error are appended
    startup_timeout_s: float = 300.0  # seconds to become ready; after that it is killed and restarted
    shutdown_timeout_s: float = 25.0  # seconds from SIGTERM to SIGKILL


class SupervisedEngine:
    """One engine under supervision."""

    def __init__(self, spec: LaunchSpec, on_event: Callable[[str, str], None]) -> None:
        self.spec = self._wanted = spec
        self.ready = asyncio.Event()
        self._on_event = on_event
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: EngineProcess | None = None
        self.state = LaunchState.STOPPED
        self._is_over = False
        self._restarting = asyncio.Lock()
        self.restarts = 0
        self.last_exit: str | None = None  # how it last ended, in words

    @property
    def pid(self) -> int | None:
        """Id of its first process; None while it does not run."""
        return None if self._process is None else self._process.pid

    def describe(self) -> str:
        """Return its state and the last lines of its log."""
        state = [f"{self.spec.name}: {self.state}", *([self.last_exit] if self.last_exit else [])]
        return "\n  ".join([", ".join(state), f"{self.spec.log_path}:", *_last_lines(self.spec.log_path)])

    def start(self) -> None:
        """Start it, and restart it whenever it ends."""
        self._is_over = False
        if self._task is None:
            self._stopping.clear()
            self._task = background.keep_running("engines", self._supervise, of=self.spec.name, stopping=self._stopping)

    async def stop(self) -> None:
        """Stop it: SIGTERM, then SIGKILL after a time-out."""
        self._is_over = True
        await self._end()

    def change(self, spec: LaunchSpec) -> None:
        """Restart it with another spec, unless it is stopped meanwhile; of several specs, the last one counts."""
        if spec != self._wanted:
            self._wanted = spec
            background.start("engines", self._restart(), of=spec.name)

    async def _restart(self) -> None:
        async with self._restarting:
            if self.spec == self._wanted:
                return
            self._on_event(self.spec.name, "restarting with other settings")
            await self._end()
            self.spec = self._wanted
            if not self._is_over:
                self.restarts += 1
                self.start()

    async def _end(self) -> None:
        if (task := self._task) is None:
            return
        self._stopping.set()
        grace_s = self.spec.shutdown_timeout_s if self.ready.is_set() else UNREADY_SHUTDOWN_S
        if self._process is not None:
            self._process.terminate()
        try:
            await asyncio.wait({task}, timeout=min(grace_s, self.spec.shutdown_timeout_s))
        finally:
            if self._process is not None:
                self._process.kill()
        await task
        if self._task is task:
            self._task = None

    async def _supervise(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                self.last_exit, ready_for_s = await self._run()
                if self._stopping.is_set():
                    break
                failures = 1 if ready_for_s >= BACKOFF_RESET_S else failures + 1
                pause_s = min(FIRST_BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S)
                self._enter(LaunchState.BACKOFF, f"{self.last_exit}; restarting in {pause_s:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                    break
                self.restarts += 1
        finally:
            self._enter(LaunchState.STOPPED, "stopped")

    async def _run(self) -> tuple[str, float]:
        """Run the engine once; return how it ended and for how many seconds it was ready."""
        for address in map(urlsplit, self.spec.health_urls):
            if address.hostname and address.port and not port_is_free(address.hostname, address.port):
                return f"port {address.port} is in use by another process", 0.0
        self.state, began_s = LaunchState.STARTING, time.monotonic()
        try:
            process = self._process = await EngineProcess.start(self.spec.argv, self.spec.env, self.spec.log_path)
        except OSError as error:
            return str(error), 0.0
        self._on_event(self.spec.name, f"started as process {process.pid}, logging to {self.spec.log_path}")
        end = background.start("engines", process.wait(), raises=Exception)
        health = background.start("engines", _until_healthy(self.spec.health_urls), raises=Exception)
        bounding = background.keep_running("engines", partial(_bound, self.spec.log_path), of=self.spec.name)
        try:
            await asyncio.wait({end, health}, timeout=self.spec.startup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return describe_exit(await end), 0.0
            if not health.done():
                process.kill()
                await end
                return f"killed because it was not ready after {self.spec.startup_timeout_s:g} s", 0.0
            await health
            ready_at_s = time.monotonic()
            self._enter(LaunchState.READY, f"ready after {ready_at_s - began_s:.1f} s")
            return describe_exit(await end), time.monotonic() - ready_at_s
        finally:
            self.ready.clear()
            health.cancel()
            bounding.cancel()
            process.kill()
            await asyncio.wait({end, health})
            self._process = None

    def _enter(self, state: LaunchState, text: str) -> None:
        self.state = state
        if state is LaunchState.READY:
            self.ready.set()
        self._on_event(self.spec.name, text)


async def _until_healthy(urls: Sequence[str]) -> None:
    async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False, verify=False) as client:  # noqa: S501 -- http
        for url in urls:
            while not await _answers_200(client, url):  # noqa: ASYNC110 -- there is no event for another process's health
                await asyncio.sleep(HEALTH_INTERVAL_S)


async def _answers_200(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def _bound(log: Path) -> None:
    """Rotate a log whenever it gets long: an engine writes a line per request and probe."""
    while True:
        await asyncio.sleep(LOG_CHECK_S)
        await asyncio.to_thread(_rotate, log)


def _rotate(log: Path) -> None:
    if log.exists() and log.stat().st_size > LOG_BYTES:  # somebody may have removed it
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)  # the engine appends, so it continues at the new end


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of a log without reading the whole file."""
    if not path.exists():
        return []
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return [printable(line) for line in log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]]


def check_command(spec: LaunchSpec) -> None:
    """Raise `LaunchError` if the command of an engine does not exist."""
    command = spec.argv[0]
    if shutil.which(command, path=spec.env.get("PATH")) is None:
        install = "pip install '.[vllm]' in a checkout (deploy/README.md#install), or " if command == "vllm" else ""
        raise LaunchError(f"{spec.name}: command not found: {command!r}; {install}give its path in serve.command")


class Launcher:
    """Supervisor of engines: starts them, restarts those that end, and stops them.

    The engines' process groups end even if this process is killed.
    """

    def __init__(self, specs: Sequence[LaunchSpec], on_event: Callable[[str, str], None] | None = None) -> None:
        # Called on each change of an engine's state, with its name and a line of text.
        self._on_event = on_event or (lambda _name, _text: None)
        self.engines = [SupervisedEngine(spec, self._on_event) for spec in specs]

    async def start(self) -> None:
        """Start all engines without waiting until they are ready."""
        for engine in self.engines:
            check_command(engine.spec)
        for engine in self.engines:
            engine.start()

    def change(self, specs: Sequence[LaunchSpec]) -> None:
        """Restart the engines whose spec, found by name, has changed."""
        wanted = {spec.name: spec for spec in specs}
        for engine in self.engines:
            if (spec := wanted.get(engine.spec.name)) is not None:
                engine.change(spec)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every engine is ready."""
        longest_s = max((engine.spec.startup_timeout_s for engine in self.engines), default=0.0)
        limit_s = longest_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while unready := self._unready():
                    await unready[0].ready.wait()
        except TimeoutError:
            engines = "\n".join(engine.describe() for engine in self._unready())
            raise LaunchError(f"not ready after {limit_s:g} s:\n{engines}") from None

    async def stop(self) -> None:
        """Stop all engines: SIGTERM, then SIGKILL after `shutdown_timeout_s`; may be called again."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def _unready(self) -> list[SupervisedEngine]:
        return [engine for engine in self.engines if not engine.ready.is_set()]
