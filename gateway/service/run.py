"""Runs the gateway: starts the replicas, serves, and stops everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from backends import background
from backends.http.address import host_and_port
from backends.launch.supervisor import Launcher, LaunchError
from gateway.config.settings import PoolSettings
from gateway.discovery.discovery import Discovery
from gateway.gateway import Gateway, rooms
from gateway.listening.listener import ListenError, is_listening, open_sockets
from gateway.listening.systemd import ServiceManager
from gateway.relay.waiting.first_start import LONGEST_S
from gateway.reload.reloader import Reloader, ReloadError
from gateway.reload.series import BesideSeries
from gateway.reload.watch import watch
from gateway.routing.keys import digest
from gateway.service.assembly import assemble
from gateway.service.banner import admin_key_line, pool_lines, start_lines, try_line
from gateway.service.change import prepare
from gateway.service.replicas import SIMULATOR, Replicas, plan
from gateway.service.server import Server, raise_open_file_limit
from gateway.service.stores import write_launched
from gateway.service.worker import Assignment, Configuration
from gateway.service.workers import Workers
from gateway.telemetry.log_format import configure_logging
from gateway.telemetry.registry import Registry

_READY_POLL_S = 0.1
_DISCOVERY_PAUSE_S = 0.5
"""Least seconds between two changes of the pool by discovery."""
_DISCOVERY_RETRY_S = 30.0
"""Pause after a change that failed: its source may report nothing else for hours."""
_FLUSH_S = 1.0
_PRINT_S = 0.5
logger = logging.getLogger("gateway")


def serve(
    settings: PoolSettings,
    config_path: Path,
    load: Callable[[], PoolSettings],
    run_dir: Path,
) -> int:
    """Serve a pool until SIGTERM or SIGINT; `run_dir` is removed at the end."""
    configure_logging(logging.INFO, settings.telemetry.log_format)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the event loop runs
    raise_open_file_limit()
    with contextlib.ExitStack() as stack:
        cleared = stack.enter_context(contextlib.ExitStack())
        cleared.callback(shutil.rmtree, run_dir, ignore_errors=True)
        manager = ServiceManager()
        if settings.server.workers > 1:
            resource_tracker.ensure_running()  # its process inherits the ignored signal
        try:
            beside = [address for room in rooms() if (address := room.beside(settings)) is not None]
            opened = open_sockets(settings, manager.sockets, {each.name: each[1:3] for each in beside})
            sockets = [stack.enter_context(each) for each in opened]
        except ListenError as error:
            print(f"{config_path}: {error}", file=sys.stderr)
            return 1
        serving = _Serving(settings, plan(settings, run_dir), manager, sockets, run_dir, config_path, load)
        status = background.run_process(serving.run())
        if serving.keep_logs:
            cleared.pop_all()
            logger.warning("the logs of the replicas are in %s", run_dir)
    logger.info("ended")
    return status


def _show(lines: Iterable[str]) -> None:
    """Print lines; if that fails, or nobody reads them, keep serving."""
    try:
        if sys.stdout is not None and not select.select([], [sys.stdout], [], _PRINT_S)[1]:
            raise BlockingIOError("nobody reads it")
        print("\n".join(lines), flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written: %s", error)
        background.leave_stdout()


async def _warn(settings: PoolSettings) -> None:
    """Log what rooms cannot do of what the settings ask; `gateway check` calls it an error."""
    for room in rooms():
        if problem := await asyncio.to_thread(room.problem, settings):
            logger.warning("%s", problem)


class _Serving:
    """One run of the gateway, in its main process."""

    def __init__(
        self,
        settings: PoolSettings,
        replicas: Replicas,
        manager: ServiceManager,
        sockets: list[socket.socket],
        run_dir: Path,
        config_path: Path,
        load: Callable[[], PoolSettings],
    ) -> None:
        self._config_path = config_path
        kinds = rooms()
        self._drawn = {name: section for kind in kinds for name, section in kind.drawn(settings).items()}
        self._settings = settings.model_copy(update=self._drawn)
        self._metrics = Registry()
        self._series = BesideSeries(self._metrics, kinds)
        self._reloader = Reloader(load, settings, self._apply, self._series.count_reload, kinds)
        self._gateway: Gateway | None = None
        self._found_others = asyncio.Event()
        self._discovery = Discovery(self._found_others.set, self._series.count_discovery)
        self._replicas = replicas
        self._manager = manager
        self._sockets = sockets
        self._addresses: list[tuple[str, int]] = [opened.getsockname()[:2] for opened in sockets]
        self._run_dir = run_dir
        self._started = asyncio.Event()
        self._generated_admin_key = secrets.token_urlsafe(24)  # in force, and printed, if the file has none
        self._launcher = Launcher(replicas.launches, self._on_launch)
        self._workers: Workers | None = None
        self.keep_logs = False

    async def run(self) -> int:
        """Start the replicas, serve, and stop the replicas."""
        _show(pool_lines(self._settings))
        request, is_watched = self._reloader.request, lambda: self._settings.server.watch
        tasks = [
            background.start("announcement", self._announce()),
            background.start("announcement", _warn(self._settings)),
            background.keep_running("tick", self._manager.keep_alive, of="the watchdog"),
            background.keep_running("reloads", self._reloader.run),
            background.keep_running(
                "pool file", partial(watch, self._config_path, is_watched, lambda: request("file"))
            ),
            background.keep_running("discovery", self._follow_discovery),
        ]
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, request, "signal")
        try:
            await self._launcher.start()
            await self._discovery.start(self._settings)
            self._replicas = await self._plan(self._settings)
            if self._settings.server.workers > 1:
                return await self._serve_with_workers()
            return await self._serve_alone()
        except LaunchError as error:
            logger.critical("%s", error)
            return 1
        finally:
            for task in tasks:
                task.cancel()
            self._discovery.keep(None)
            await self._launcher.stop()

    async def _serve_alone(self) -> int:
        gateway = self._gateway = assemble(
            self._settings,
            self._replicas.backends,
            self._admin_digest(self._settings),
            metrics=self._metrics,
            run_dir=self._run_dir,
            reload=partial(self._reloader.reload, "admin"),
        )
        server = Server(gateway, has_process=True, on_started=self._started.set)
        self._end_by(server.drain, lambda: server.in_flight)
        await server.serve_at(*self._sockets)
        return 0 if server.started else 1

    def _end_by(self, end: Callable[[], None], in_flight: Callable[[], int]) -> None:
        """On a signal, call `end` and log which requests it waits for."""

        def ended() -> None:
            self._manager.say("STOPPING=1")
            longest = f"at most {self._settings.server.drain_s:g} s; a second signal aborts them"
            logger.info("stopping: %d requests are in flight, which may take %s", in_flight(), longest)
            end()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended)

    async def _apply(self, settings: PoolSettings) -> None:
        """Put new settings into effect, or raise."""
        await self._started.wait()
        admin_digest = self._admin_digest(settings)
        settings = settings.model_copy(update=self._drawn)  # what rooms have drawn stays
        try:
            await self._discovery.start(settings)
            replicas = await self._plan(settings)
            if self._gateway is not None:
                change = await prepare(self._gateway, settings, replicas.backends, admin_digest)
                change.commit()
            elif self._workers is not None:
                await self._workers.change(settings, replicas.backends, admin_digest)
            if self._settings.admin.digest is not None and settings.admin.digest is None:
                _show([admin_key_line(self._generated_admin_key)])
            if settings != self._settings:
                background.start("announcement", _warn(settings))
            self._settings, self._replicas = settings, replicas
            self._launcher.change(replicas.launches)
        finally:
            self._discovery.keep(self._settings)

    def _admin_digest(self, settings: PoolSettings) -> bytes:
        """Return the digest of the admin key; without one in the file, the generated one counts, not an earlier one."""
        return settings.admin.digest or digest(self._generated_admin_key)

    async def _plan(self, settings: PoolSettings) -> Replicas:
        found = self._discovery.found(settings)
        return await asyncio.to_thread(plan, settings, self._run_dir, self._replicas, found)

    async def _follow_discovery(self) -> None:
        """Add replicas that sources find to the pool, and remove those that are gone."""
        while True:
            await self._found_others.wait()
            self._found_others.clear()
            try:
                await self._reloader.apply_again()
                await asyncio.sleep(_DISCOVERY_PAUSE_S)
                continue
            except ReloadError as error:
                logger.warning("the replicas that were found cannot join: %s", error.message)
            except Exception as error:  # noqa: BLE001 -- a later change may succeed
                background.note("discovery", error)
            await asyncio.sleep(_DISCOVERY_RETRY_S)
            self._found_others.set()

    async def _serve_with_workers(self) -> int:
        background.on_failure.append(self._series.count_failure)
        current = Configuration(0, self._settings, self._replicas.backends, self._admin_digest(self._settings))
        places = [opened if is_listening(opened) else opened.getsockname()[:2] for opened in self._sockets]
        self._workers = Workers(
            Assignment(0, current, places, self._run_dir),
            reload=partial(self._reloader.reload, "admin"),
            on_started=self._started.set,
        )
        self._end_by(self._workers.stop, self._workers.in_flight)
        flushing = background.keep_running("tick", self._flush, of="metrics")
        try:
            return await self._workers.run()
        finally:
            flushing.cancel()

    async def _flush(self) -> None:
        """Pass this process's counts on to the workers."""
        while True:
            self._metrics.flush()
            await asyncio.sleep(_FLUSH_S)

    async def _announce(self) -> None:
        """Print the address once all workers accept connections, and an example once a replica can answer."""
        await self._started.wait()
        self._manager.say("READY=1")
        addresses = [host_and_port(*each) for each in self._addresses]
        generated_key = None if self._settings.admin.digest else self._generated_admin_key
        _show(start_lines(self._settings, addresses, generated_key))
        if not self._is_ready():
            who = "No replica answers yet" if len(self._settings.models) == 1 else "Not every model has a replica yet"
            _show([f"{who}: requests wait for the first one, for at most {LONGEST_S:.0f} s."])
        while not self._is_ready():  # noqa: ASYNC110 -- pools of several processes
            await asyncio.sleep(_READY_POLL_S)
        _show(["Try it:", "  " + try_line(self._settings, f"{self._settings.server.scheme}://{addresses[0]}")])

    def _is_ready(self) -> bool:
        serving = self._gateway or self._workers
        return serving is not None and serving.is_ready()

    def _on_launch(self, name: str, text: str) -> None:
        logger.info("%s: %s", name, text)
        engines = {engine.spec.name: engine for engine in self._launcher.engines}
        self.keep_logs |= any(engine.restarts > 0 for engine in engines.values())
        launched: dict[str, Mapping[str, Any]] = {}
        for backend in self._replicas.backends:
            own_name = f"{backend.model}/{backend.name}"
            if (engine := engines.get(SIMULATOR if backend.simulated else own_name)) is not None:
                counts = {"restarts": engine.restarts, "last_exit": engine.last_exit}
                launched[own_name] = {"pid": engine.pid, "process": engine.state, **counts}
        with background.guarded("engines", of="their list"):
            write_launched(self._run_dir, launched)
