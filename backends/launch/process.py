"""One run of an engine under a reaper process, so that none of its processes outlives the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backends.launch import reaper

REAPER_END_S = 10.0
"""Seconds that a reaper may take to kill and reap an engine."""


class EngineProcess:
    """A running command and all its descendants."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            control, self._control = os.pipe()
            self._report, report = os.pipe()
            try:
                self._reaper = subprocess.Popen(  # noqa: S603 -- the operator's own command, from the pool file
                    [sys.executable, "-I", "-S", reaper.__file__, str(report), *argv],
                    stdin=control,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    pass_fds=(report,),
                    start_new_session=True,
                )
            except OSError:
                os.close(self._control)
                os.close(self._report)
                raise
            finally:
                os.close(control)
                os.close(report)

    async def follow(self, on_start: Callable[[int], None]) -> int | None:
        """Wait until all processes of the engine have ended; may be called once."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._report, "rb", buffering=0)
        )
        pid: int | None = None
        try:
            if line := await reader.readline():
                pid = int(line)
                on_start(pid)
                status = await reader.readline()
                return int(status) if status else None
            return await asyncio.to_thread(self._reaper.wait)  # the engine could not be started; the log says why
        finally:
            transport.close()
            self.kill()
            await asyncio.shield(asyncio.to_thread(self._end_reaper, pid))

    def terminate(self) -> None:
        """Ask the engine to end, with SIGTERM to its first process."""
        if self._control >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, reaper.TERMINATE)

    def kill(self) -> None:
        """Kill the engine and all its descendants."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _end_reaper(self, pid: int | None) -> None:
        """Wait for the reaper to end; if it was killed or hangs, kill the engine's process group."""
        try:
            died = self._reaper.wait(REAPER_END_S) < 0
        except subprocess.TimeoutExpired:
            died = True
        if died:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.killpg(pid, signal.SIGKILL)
            self._reaper.kill()
            self._reaper.wait()


def describe_exit(status: int | None) -> str:
    """Return an exit status in words.

    Examples
    --------
    >>> describe_exit(-9), describe_exit(3)
    ('killed by SIGKILL', 'exit status 3')
    """
    if status is None:
        return "killed together with its reaper"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
