"""Serves the addresses of a gateway process, from opening them to draining."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

from backends import background
from backends.background import Seldom
from gateway.config.settings.server import ServerSettings
from gateway.gateway import Gateway
from gateway.http.reply import Connection
from gateway.http.server import HttpServer, ServerLimits
from gateway.listening.certificate import Certificate
from gateway.listening.listener import Listener
from gateway.relay.frontend import HttpFrontend
from gateway.service.app import OwnPaths, create_app

log = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000  # more objects than a thousand requests in flight hold
_KEEP_ALIVE_S = 75  # longer than clients' pools keep connections idle, so that clients close first
_OTHER_FILES = 64  # opened besides connections of clients and to backends
_POLL_S = 0.05
_ABORT_S = 5.0  # for aborted requests to end
_FILES_CHECK_S = 1.0


class Server:
    """The HTTP server of one gateway process, on sockets that are already open; it ends through `drain`."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        has_process: bool = False,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        self.started = False  # whether connections are accepted
        self.is_draining = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()  # requests in flight for own paths
        self.app = create_app(gateway)
        self._gateway = gateway
        # Whether the process only serves, so that its garbage collector can be tuned.
        self._has_process = has_process
        self._on_started = on_started  # called once connections are accepted
        self._must_end = False  # whether to stop waiting for requests in flight
        settings = gateway.settings.server
        self._certificate = None if settings.tls is None else Certificate(settings.tls, "server.tls")
        limits = server_limits(settings)
        self._own = OwnPaths(self.app, gateway)
        frontend = HttpFrontend(gateway, self._own, self.tasks, scheme=settings.scheme)
        self._clients = HttpServer(frontend, limits, gateway.relay.writes)
        own = OwnPaths(self.app, gateway, is_admin=True)
        frontend = HttpFrontend(gateway, own, self.tasks, is_admin=True, scheme=settings.scheme)
        self._operators = HttpServer(frontend, limits)
        made = [room.companion(self._own) for room in gateway.rooms]
        self._companions = [each for each in made if each is not None]
        gateway.on_change.append(self._follow)

    @property
    def connections(self) -> set[Connection]:
        """The open connections of clients."""
        return self._clients.connections

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._gateway.relay.exchanges)

    async def serve_at(self, clients: socket.socket, *others: socket.socket) -> None:
        """Serve until drained: clients at one address, `/admin` and the companions of rooms at others."""
        sockets = list(others)
        async with self.app.router.lifespan_context(self.app):
            listening = Listener(self._clients, clients, self._certificate)
            await listening.start()
            operators: Listener | None = None
            for companion in reversed(self._companions):
                await companion.start(sockets.pop())
            if sockets:
                operators = Listener(self._operators, sockets.pop(), self._certificate)
                await operators.start()
            watching = background.keep_running("open files", _watch_open_files)
            if self._has_process:
                tune_garbage_collector()
            self.started = True
            if self._on_started is not None:
                self._on_started()
            await self.is_draining.wait()
            watching.cancel()
            await listening.close(is_shared=self._gateway.settings.server.reuse_port)
            await self._wait_for_ends()
            if operators is not None:
                await operators.close(is_shared=False)

    async def _wait_for_ends(self) -> None:
        """Wait for requests in flight, which `drain` aborts after a time, but not for operators."""
        end_s = time.monotonic() + self._gateway.settings.server.drain_s + _ABORT_S
        self._clients.shutdown()
        for companion in self._companions:
            await companion.stop(self._gateway.settings.server.drain_s)
        await asyncio.sleep(_POLL_S)
        while self._has_work() and time.monotonic() < end_s:  # noqa: ASYNC110 -- no event marks the last one
            await asyncio.sleep(_POLL_S)
        for task in self.tasks:
            task.cancel()
        for connection in [*self.connections, *self._operators.connections]:
            connection.abort()

    def _has_work(self) -> bool:
        return bool(self.connections or self.tasks) and not self._must_end

    def _follow(self) -> None:
        """Apply the current settings to later requests."""
        limits = server_limits(self._gateway.settings.server)
        for server in (self._clients, self._operators):
            server.change(limits)

    def drain(self) -> None:
        """Stop accepting requests, and abort those still in flight after `drain_s`, or immediately on a second call."""
        if self.is_draining.is_set():
            self._abort()
            self._must_end = True
            return
        self.is_draining.set()
        for companion in self._companions:
            companion.drain()
        asyncio.get_running_loop().call_later(self._gateway.settings.server.drain_s, self._abort)

    def _abort(self) -> None:
        if self.in_flight:
            log.warning("%d requests in flight are aborted", self.in_flight)
        self._gateway.relay.stop()


def server_limits(settings: ServerSettings) -> ServerLimits:
    """Return the limits of the HTTP server.

    Client connections are also limited to half of the files that the process may open: the other half is for those to
    backends.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = min(settings.max_connections, max(1, (open_files - _OTHER_FILES) // 2))
    if connections < settings.max_connections:
        log.info(
            "at most %d connections, not max_connections (%d): the process may open %d files",
            connections,
            settings.max_connections,
            open_files,
        )
    return ServerLimits(
        body_bytes=settings.max_body_bytes,
        idle_s=_KEEP_ALIVE_S,
        head_s=settings.head_s,
        body_s=settings.body_s,
        connections=connections,
        unfinished_bytes=int(settings.max_unfinished_mib * 2**20),
    )


async def _watch_open_files() -> None:
    """Log when no more files can be opened: the event loop then silently closes new connections."""
    logged = Seldom()
    while True:
        await asyncio.sleep(_FILES_CHECK_S)
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE} and logged.may_say():
                log.warning("no more files can be opened (%s): new connections are closed", error.strerror)


def raise_open_file_limit() -> None:
    """Raise the limit on open files to its maximum: a stream needs two, and 1,024 is a common default."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def tune_garbage_collector() -> None:
    """Exclude existing objects from garbage collection, and collect new ones less often.

    Modules and long-lived objects stay until the process ends, and traversing them blocks all requests for tens of
    milliseconds. Reference counting frees requests and connections, and leaves few cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
