"""One run of an engine, held by a guard process so that nothing of it outlives this one."""

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

GUARD_END_S = 10.0  # how long a guard may take to kill and reap


class EngineProcess:
    """A running command and all its descendants.

    Parameters
    ----------
    argv, env
        The command, and what is added to the inherited environment.
    log_path
        Its standard output and error are appended here.

    Raises
    ------
    OSError
        The log cannot be written or no process be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            held, self._control = os.pipe()
            self._report, report = os.pipe()
            try:
                self._guard = subprocess.Popen(  # noqa: S603 -- the operator's own command, from the pool file
                    [sys.executable, "-I", "-S", reaper.__file__, str(report), *argv],
                    stdin=held,
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
                os.close(held)
                os.close(report)

    async def follow(self, on_start: Callable[[int], None]) -> int | None:
        """Wait until nothing is left of the engine. To be called once.

        Parameters
        ----------
        on_start
            Called with the id of the engine's first process when that runs.

        Returns
        -------
        int or None
            Exit status of the first process, negative for a signal; None if its guard was killed, which kills it.
        """
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
            return await asyncio.to_thread(self._guard.wait)  # it could not start the engine, and says so in the log
        finally:
            transport.close()
            self.kill()
            await asyncio.shield(asyncio.to_thread(self._end_guard, pid))

    def terminate(self) -> None:
        """Ask the engine to end (SIGTERM to its first process)."""
        if self._control >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, reaper.TERMINATE)

    def kill(self) -> None:
        """Kill the engine and all its descendants."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _end_guard(self, pid: int | None) -> None:
        """Reap the guard; where it was killed or hangs, kill the engine's group in its stead."""
        try:
            died = self._guard.wait(GUARD_END_S) < 0
        except subprocess.TimeoutExpired:
            died = True
        if died:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.killpg(pid, signal.SIGKILL)
            self._guard.kill()
            self._guard.wait()


def describe_exit(status: int | None) -> str:
    """Say an exit status in words."""
    if status is None:
        return "killed together with its guard"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
