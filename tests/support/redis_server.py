"""A real Redis, in a process group of its own, that can be killed, stopped, emptied and set back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from backends.launch.ports import free_port


class RedisServer:
    """A `redis-server` on a free port of this machine that keeps nothing on disk unless told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = Redis(port=self.port, socket_timeout=5.0)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, with_saved: bool = False) -> None:
        if not with_saved:
            (self.folder / "dump.rdb").unlink(missing_ok=True)
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--unixsocket", str(self.socket), "--dir", str(self.folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end_s = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(RedisError):
                if self.client.ping():
                    return
            assert time.monotonic() < end_s, (self.folder / "log").read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once; what it held is gone."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
            self._process.wait(10.0)
            self._process = None

    def freeze(self) -> None:
        """Let it take connections and answer nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def save(self) -> None:
        """Write down what it holds now, for a start `with_saved`."""
        self.client.save()

    def flush(self) -> None:
        self.client.flushall()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="gateway-redis-"))
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        server.client.close()
        shutil.rmtree(folder)
