"""A real Redis server that can be killed, frozen, emptied and reset to an older state."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from backends.launch.ports import free_port
from benchmarks.process import spawned
from tests.support.waiting import eventually_blocking


class RedisServer:
    """A `redis-server` on a free port, which writes to disk only on `save`.

    Parameters
    ----------
    options
        More arguments of the command.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = Redis(port=self.port, socket_timeout=5.0)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, with_saved: bool = False) -> None:
        if not with_saved:
            (self.folder / "dump.rdb").unlink(missing_ok=True)
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--unixsocket", str(self.socket), "--dir", str(self.folder), *self._options]
        self._process = spawned(command, self.folder / "log")
        try:
            eventually_blocking(self._answers)
        except AssertionError:
            raise AssertionError((self.folder / "log").read_text()) from None

    def _answers(self) -> bool:
        with contextlib.suppress(RedisError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        """Kill the server; its data is lost."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
            self._process.wait(10.0)
            self._process = None

    def freeze(self) -> None:
        """Stop the process: it accepts connections but does not reply."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def save(self) -> None:
        """Write its data to disk, for `start(with_saved=True)`."""
        self.client.save()

    def flush(self) -> None:
        self.client.flushall()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="gateway-redis-"))
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        server.client.close()
        shutil.rmtree(folder)
