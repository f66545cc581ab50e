"""One run of an engine, in a process group that ends with the engine and with the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

GROUP_END_S = 5.0
"""Seconds that the other processes of an engine may take to end after its first one; then they are killed."""

_POLL_S = 0.02
_KILL_GROUP = 'read _; kill -s KILL -- "-$1"'
"""Shell command that kills a process group once nothing holds its input open: the gateway has ended."""


class EngineProcess:
    """A running command, the first process of its group."""

    def __init__(self, engine: Process, watcher: Process) -> None:
        self.pid = engine.pid
        self._engine = engine
        self._watcher = watcher  # ends the group if this process ends in whatever way

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> EngineProcess:
        """Start a command; its output is appended to a file."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
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
        except BaseException:  # nobody would know of the engine, which has the port and the GPU
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            raise
        return cls(engine, watcher)

    async def wait(self) -> int:
        """Wait until the engine and the processes of its group have ended; return its exit status."""
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
        """Kill the engine; `wait` ends the others."""
        with contextlib.suppress(ProcessLookupError):
            self._engine.kill()

    async def _end_group(self) -> None:
        """End what the engine has left in its group: by SIGTERM first, as some remove shared memory then."""
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
