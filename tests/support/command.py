"""The command `gateway` as a process, in its own process group."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import httpx

from benchmarks.process import is_alive, tree
from tests.support.paths import ROOT
from tests.support.waiting import TIMEOUT_S, eventually_blocking

ADMIN_KEY = "command-admin-key"


@dataclass
class Command:
    """A running gateway process, with the addresses that it has printed; those are empty that it does not have."""

    admin: ClassVar[dict[str, str]] = {"authorization": f"Bearer {ADMIN_KEY}"}
    process: subprocess.Popen[str]
    log: Path

    def printed(self) -> str:
        return self.log.read_text()

    def _printed_after(self, words: str) -> str:
        match = re.search(rf"{words}(\S+)", self.printed())
        return match[1] if match else ""

    @property
    def url(self) -> str:
        return self._printed_after("Listening at ")

    @property
    def admin_url(self) -> str:
        return self._printed_after("/admin is at ")

    @property
    def picker(self) -> str:
        return self._printed_after("grpc://")

    def get(self, path: str, **kwargs: object) -> httpx.Response:
        """Send a GET request on a new connection, so that any worker may answer."""
        return httpx.get(self.url + path, timeout=TIMEOUT_S, trust_env=False, **kwargs)  # type: ignore[arg-type]

    def post(self, path: str, json: object, **kwargs: object) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=TIMEOUT_S, trust_env=False, **kwargs)  # type: ignore[arg-type]

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S, what: str = "") -> None:
    """Wait until a condition holds; an error of httpx means that it does not hold yet."""

    def holds() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return bool(condition())
        return False

    eventually_blocking(holds, timeout_s, what or str(condition))


def until_ready(command: Command) -> None:
    """Wait until all workers are ready.

    Which of them answers is chance: of two, one that is not ready escapes once in 10**9 times.
    """
    until(lambda: all(command.get("/readyz").status_code == 200 for _ in range(30)), what="all workers ready")


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    return set(tree(pid))


def alive(pids: set[int]) -> set[int]:
    """Return the processes that still run; zombies do not count."""
    return {pid for pid in pids if is_alive(pid)}


@contextlib.contextmanager
def gateway_command(
    config: Path,
    tmp_path: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    subcommand: str = "",
    cwd: Path = ROOT,
    launch: tuple[str, ...] = ("-m", "gateway"),
    passed: tuple[int, ...] = (),
    stderr: int = subprocess.STDOUT,
) -> Iterator[Command]:
    """Run `gateway [SUBCOMMAND] --config CONFIG` on a free port, and check at the end that no process is left.

    `launch` are the arguments of Python that become the gateway, and `passed` the descriptors that it inherits.
    """
    log, words = tmp_path / "gateway.log", [subcommand] if subcommand else []
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *launch, *words, "--config", str(config), "--port", "0", *arguments],
            cwd=cwd,
            stdout=output,
            stderr=stderr,
            text=True,
            start_new_session=True,
            pass_fds=passed,
            env={**os.environ, "GATEWAY_ADMIN_KEY": ADMIN_KEY, **(env or {})},
        )
    command = Command(process, log)
    try:
        # A gateway whose replicas are simulated is ready when it says how to try it; others may have none that answers.
        pool = config.read_text("utf-8") if config.is_file() else ""
        is_simulated = "simulate" in pool and not any(other in pool for other in ("url", "discover", "picker"))
        said = "Try it:" if is_simulated else "Listening at"
        until(lambda: process.poll() is not None or said in command.printed(), what="the URL")
        yield command
    finally:
        processes = family(process.pid)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)
        with contextlib.suppress(AssertionError):  # some processes end a moment later
            until(lambda: not alive(processes))
        left = alive(processes)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"left running: {left}\n{command.printed()}"
