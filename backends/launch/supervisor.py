"""Starting, supervising and stopping the engines that the gateway runs itself."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from backends.launch.ports import free_port, port_is_free
from backends.launch.process import EngineProcess, describe_exit
from backends.launch.vllm_command import vllm_serve_argv

__all__ = ["LaunchError", "LaunchSpec", "LaunchState", "LaunchStatus", "Launcher", "free_port", "vllm_serve_argv"]

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
WELL_AFTER_S = 60.0  # ready for so long, an engine has earned its first backoff again
HEALTH_EVERY_S = 0.25
HEALTH_TIMEOUT_S = 2.0
UNREADY_SHUTDOWN_S = 2.0  # vLLM may ignore SIGTERM while it starts, and nothing runs there yet
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 8192


class LaunchError(Exception):
    """An engine cannot be started or did not become ready; says which, why, and ends with what it last logged."""


class LaunchState(StrEnum):
    """Where an engine is between being started and being stopped."""

    STARTING = "starting"  # runs, its health not yet seen
    READY = "ready"
    BACKOFF = "backoff"  # died; started again soon
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One engine to run.

    Parameters
    ----------
    name
        For logs: `tiny/ngram`.
    argv
        The command, found on PATH if it has no slash.
    health_urls
        All must answer 200 for the engine to be ready.
    env
        Added to the inherited environment.
    log_path
        Its standard output and error are appended here.
    startup_timeout_s
        Not ready for so long, it is killed and started again.
    shutdown_timeout_s
        From SIGTERM to SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    health_urls: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    startup_timeout_s: float = 300.0
    shutdown_timeout_s: float = 25.0


@dataclass(frozen=True, slots=True)
class LaunchStatus:
    """How an engine is.

    Parameters
    ----------
    pid
        Its first process; None while none runs.
    restarts
        How often it was started again.
    last_exit
        How it last ended, for a person; None if it never did.
    since_s
        Seconds that it has been in `state`.
    """

    name: str
    pid: int | None
    state: LaunchState
    restarts: int
    last_exit: str | None
    since_s: float


class _Engine:
    """One engine under supervision."""

    def __init__(self, spec: LaunchSpec, on_event: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self._on_event = on_event
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: EngineProcess | None = None
        self._pid: int | None = None
        self._state = LaunchState.STOPPED
        self._since_s = time.monotonic()
        self._restarts = 0
        self._last_exit: str | None = None

    def status(self) -> LaunchStatus:
        since_s = time.monotonic() - self._since_s
        return LaunchStatus(self.spec.name, self._pid, self._state, self._restarts, self._last_exit, since_s)

    def account(self) -> str:
        """Tell how it is and what it last logged."""
        lines = [f"{self.spec.name}: {self._state}", *([self._last_exit] if self._last_exit else [])]
        return "\n  ".join([", ".join(lines), f"{self.spec.log_path}:", *_last_lines(self.spec.log_path)])

    def start(self) -> None:
        if self._task is None:
            self._stopping.clear()
            self._task = asyncio.create_task(self._supervise(), name=self.spec.name)

    async def stop(self) -> None:
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
        self._task = None

    async def _supervise(self) -> None:
        deaths = 0
        try:
            while not self._stopping.is_set():
                self._last_exit, ready_for_s = await self._run()
                if self._stopping.is_set():
                    break
                deaths = 1 if ready_for_s >= WELL_AFTER_S else deaths + 1
                pause_s = min(FIRST_BACKOFF_S * 2 ** (deaths - 1), LONGEST_BACKOFF_S)
                self._enter(LaunchState.BACKOFF, f"{self._last_exit}; tried again in {pause_s:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                    break
                self._restarts += 1
        finally:
            self._enter(LaunchState.STOPPED, "stopped")

    async def _run(self) -> tuple[str, float]:
        """Run it once to its end; return how it ended and for how many seconds it was ready."""
        for address in map(urlsplit, self.spec.health_urls):
            if address.hostname and address.port and not port_is_free(address.hostname, address.port):
                return f"port {address.port} is in use by another process", 0.0
        self._state, self._since_s = LaunchState.STARTING, time.monotonic()
        try:
            self._process = EngineProcess(self.spec.argv, self.spec.env, self.spec.log_path)
        except OSError as error:
            return str(error), 0.0
        end = asyncio.create_task(self._process.follow(self._have_pid))
        health = asyncio.create_task(_until_healthy(self.spec.health_urls))
        try:
            await asyncio.wait({end, health}, timeout=self.spec.startup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return describe_exit(await end), 0.0
            if not health.done():
                self._process.kill()
                await end
                return f"not ready after {self.spec.startup_timeout_s:g} s, and killed", 0.0
            await health
            self._enter(LaunchState.READY, f"ready after {time.monotonic() - self._since_s:.1f} s")
            ready_at_s = self._since_s
            return describe_exit(await end), time.monotonic() - ready_at_s
        finally:
            self.ready.clear()
            health.cancel()
            self._process.kill()
            await asyncio.wait({end, health})
            self._process = self._pid = None

    def _have_pid(self, pid: int) -> None:
        self._pid = pid
        self._on_event(self.spec.name, f"started as process {pid}; it logs to {self.spec.log_path}")

    def _enter(self, state: LaunchState, text: str) -> None:
        self._state, self._since_s = state, time.monotonic()
        if state is LaunchState.READY:
            self.ready.set()
        self._on_event(self.spec.name, text)


async def _until_healthy(urls: Sequence[str]) -> None:
    async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            while not await _answers_200(client, url):  # noqa: ASYNC110 -- another process's health has no event
                await asyncio.sleep(HEALTH_EVERY_S)


async def _answers_200(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of a log that may be long."""
    if not path.exists():
        return []
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]


def _check_command(spec: LaunchSpec) -> None:
    command = spec.argv[0]
    if shutil.which(command, path=spec.env.get("PATH")) is None:
        raise LaunchError(f"{spec.name}: there is no command {command!r} here")


class Launcher:
    """Runs engines: starts them, starts again what dies, and leaves nothing running.

    Every engine and all that it starts is also ended when this process is killed.

    Parameters
    ----------
    specs
        What to run.
    on_event
        Called with an engine's name and a line about what happened to it.
    """

    def __init__(self, specs: Sequence[LaunchSpec], on_event: Callable[[str, str], None] | None = None) -> None:
        self._engines = [_Engine(spec, on_event or (lambda _name, _text: None)) for spec in specs]

    async def start(self) -> None:
        """Start all engines and return at once.

        Raises
        ------
        LaunchError
            A command does not exist; then nothing is started.
        """
        for engine in self._engines:
            _check_command(engine.spec)
        for engine in self._engines:
            engine.start()

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every engine is ready.

        Parameters
        ----------
        timeout_s
            None waits as long as the slowest engine may take to start.

        Raises
        ------
        LaunchError
            Who is not ready by then, and the end of its log.
        """
        longest_s = max((engine.spec.startup_timeout_s for engine in self._engines), default=0.0)
        limit_s = longest_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while late := self._not_ready():
                    await late[0].ready.wait()
        except TimeoutError:
            accounts = "\n".join(engine.account() for engine in self._not_ready())
            raise LaunchError(f"not ready after {limit_s:g} s:\n{accounts}") from None

    async def stop(self) -> None:
        """End all engines: SIGTERM, after `shutdown_timeout_s` SIGKILL for what is left. May be called again."""
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def status(self) -> list[LaunchStatus]:
        """Return how each engine is, in the order of the specs."""
        return [engine.status() for engine in self._engines]

    def _not_ready(self) -> list[_Engine]:
        return [engine for engine in self._engines if not engine.ready.is_set()]
