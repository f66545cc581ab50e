"""The gateway as its users start it: the command, in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.paths import ROOT

ADMIN_KEY = "command-admin-key"


@dataclass
class Command:
    """A gateway process.

    Attributes
    ----------
    url
        Where it listens, as it says itself.
    """

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    admin: dict[str, str] = field(default_factory=lambda: {"authorization": f"Bearer {ADMIN_KEY}"})

    def printed(self) -> str:
        return self.log.read_text()

    def get(self, path: str, **kwargs: object) -> httpx.Response:
        """Ask over a connection of its own, so that any worker may answer."""
        return httpx.get(self.url + path, timeout=10.0, trust_env=False, **kwargs)  # type: ignore[arg-type]

    def post(self, path: str, json: object, **kwargs: object) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=60.0, trust_env=False, **kwargs)  # type: ignore[arg-type]

    def end(self, timeout_s: float = 40.0) -> int:
        """SIGTERM it and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def until(condition: object, timeout_s: float = 15.0, what: str = "") -> None:
    """Wait for a condition; what it raises of httpx counts as not yet."""
    assert callable(condition)
    end_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = {pid}, [pid]
    while left:
        for child in children.get(left.pop(), []):
            found.add(child)
            left.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Return those that still run (a zombie does not)."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


@contextlib.contextmanager
def gateway_command(
    config: Path, tmp_path: Path, *arguments: str, ready_s: float = 20.0, env: dict[str, str] | None = None
) -> Iterator[Command]:
    """Run `gateway --config CONFIG` on a free port until the block ends; nothing of it is left then."""
    log = tmp_path / "gateway.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--config", str(config), "--port", "0", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "GATEWAY_ADMIN_KEY": ADMIN_KEY, **(env or {})},
        )
    command = Command(process, log)
    try:
        until(lambda: process.poll() is not None or "Listening at" in command.printed(), ready_s, "the URL")
        if match := re.search(r"Listening at (\S+)", command.printed()):
            command.url = match[1]
            until(lambda: process.poll() is not None or command.get("/health").status_code == 200, 10.0, "health")
        yield command
    finally:
        everyone = family(process.pid)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)
        with contextlib.suppress(AssertionError):  # what ends by itself a moment later is not left
            until(lambda: not alive(everyone), 5.0)
        left = alive(everyone)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"left running: {left}\n{command.printed()}"
