"""Running the gateway: starts the replicas, serves, and stops everything that it started."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from backends.launch.supervisor import Launcher, LaunchError
from gateway.config.settings import PoolSettings
from gateway.recorder import with_salt
from gateway.service.assembly import assemble
from gateway.service.banner import pool_table, start_lines
from gateway.service.replicas import SIMULATOR, Replicas, plan
from gateway.service.server import Server, listen, raise_open_file_limit
from gateway.service.worker_messages import WorkerMessages
from gateway.service.workers import Workers

_SIMULATOR_READY_S = 30.0  # its first start compiles
_PRINTED_WIDTH = 120  # if standard output is not a terminal
logger = logging.getLogger("gateway")


def serve(settings: PoolSettings, config_path: Path) -> int:
    """Serve a pool until SIGTERM or SIGINT.

    Returns
    -------
    int
        Exit status: 0 after a signal, 1 if the gateway could not start.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise_open_file_limit()
    server = settings.server
    try:
        opened = listen(server.host, server.port, shared=server.workers > 1)
    except OSError as error:
        print(f"{config_path}: cannot listen on {server.host} port {server.port}: {error.strerror}", file=sys.stderr)
        print("Choose another with --host and --port, or stop the program that listens there.", file=sys.stderr)
        return 1
    run_dir = Path(tempfile.mkdtemp(prefix="gateway-"))
    with opened:
        host, port = opened.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        serving = _Serving(with_salt(settings), plan(settings, run_dir), url, run_dir)
        status = uvloop.run(serving.run(opened))
    if serving.keep_logs:
        print(f"The logs of the replicas are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
    return status


class _Serving:
    """One run of the gateway, in its main process."""

    def __init__(self, settings: PoolSettings, replicas: Replicas, url: str, run_dir: Path) -> None:
        self._settings = settings
        self._replicas = replicas
        self._url = url
        self._run_dir = run_dir
        self._generated_admin_key = secrets.token_urlsafe(24) if settings.admin.key is None else None
        self._admin_key = self._generated_admin_key or settings.admin.key.get_secret_value()  # type: ignore[union-attr]
        self._launcher = Launcher(replicas.launches, self._on_launch)
        self._worker_messages = WorkerMessages()
        self._workers: Workers | None = None
        self.keep_logs = False

    async def run(self, opened: Any) -> int:
        """Start the replicas, serve, and stop the replicas."""
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PRINTED_WIDTH)
        console.print(pool_table(self._settings))
        announce = asyncio.create_task(self._announce(console))
        try:
            await self._launcher.start()
            if self._settings.server.workers > 1:
                return await self._serve_with_workers(opened)
            return await self._serve_alone(opened)
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            announce.cancel()
            await self._launcher.stop()

    async def _serve_alone(self, opened: Any) -> int:
        gateway = assemble(self._settings, self._replicas.backends, self._admin_key)
        server = Server(gateway, self._worker_messages, has_process=True)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, server.drain)
        await server.serve(sockets=[opened])
        return 0 if server.started else 1

    async def _serve_with_workers(self, opened: Any) -> int:
        address = opened.getsockname()[:2]
        self._workers = Workers(self._settings, self._replicas.backends, self._admin_key, address, self._run_dir)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._workers.stop)
        return await self._workers.run()

    async def _announce(self, console: Console) -> None:
        """Print the address once the gateway can answer: immediately, or when the simulator has started."""
        if any(spec.name == SIMULATOR for spec in self._replicas.launches):
            loop = asyncio.get_running_loop()
            end_s = loop.time() + _SIMULATOR_READY_S
            while loop.time() < end_s and not self._simulator_is_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for line in start_lines(self._settings, self._url, self._generated_admin_key):
            console.print(line, soft_wrap=True, markup=False)

    def _simulator_is_ready(self) -> bool:
        return any(each.name == SIMULATOR and each.state == "ready" for each in self._launcher.status())

    def _on_launch(self, name: str, text: str) -> None:
        logger.info("%s: %s", name, text)
        launched: dict[str, Mapping[str, Any]] = {}
        for status in self._launcher.status():
            self.keep_logs |= status.restarts > 0
            fields = {
                "pid": status.pid,
                "process": status.state,
                "restarts": status.restarts,
                "last_exit": status.last_exit,
            }
            for backend in self._replicas.backends:
                process_name = SIMULATOR if backend.simulated else f"{backend.model}/{backend.name}"
                if process_name == status.name:
                    launched[f"{backend.model}/{backend.name}"] = fields
        self._worker_messages.launched = launched
        if self._workers is not None:
            self._workers.send_launched(launched)
