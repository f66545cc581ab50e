"""The HTTP server of a gateway process: uvicorn with its own handling of signals and draining."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import uvicorn

from backends import background
from gateway.config.settings.server import ServerSettings
from gateway.http.request_head import HeadLimits
from gateway.http.server import HttpServer, ServerConnection, ServerLimits
from gateway.relay.frontend import HttpFrontend
from gateway.service.app import OwnPaths, create_app
from gateway.service.assembly import Gateway

if TYPE_CHECKING:
    from gateway.picker.server import PickerServer

log = logging.getLogger(__name__)

_BACKLOG = 2048
_GC_THRESHOLD = 20_000  # more objects than a thousand requests in flight hold
_KEEP_ALIVE_S = 75  # longer than the idle time of clients' pools, so that the client closes first
_OTHER_FILES = 64  # what a process opens besides connections of clients and to backends
_FILES_CHECK_S = 1.0
_LOG_EVERY_S = 60.0


class Server(uvicorn.Server):
    """The HTTP server of one gateway process, on sockets that are already open.

    uvicorn runs the application's lifespan and listens; requests are read by `gateway.http.server`.

    uvicorn raises again the signal that stopped it. This server stops only through `drain`, so that the process can
    stop its replicas and exit with status 0.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        has_process: bool = False,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        self._gateway = gateway
        self._on_started = on_started  # called once connections are accepted
        self._admin_socket: socket.socket | None = None
        self._picker_socket: socket.socket | None = None
        self._admin_server: asyncio.Server | None = None
        self._admin_connections: set[ServerConnection] = set()  # not uvicorn's: they do not hold up draining
        # Whether the process serves nothing else, so that its garbage collector can be tuned.
        self._has_process = has_process
        self._watch: asyncio.Task[None] | None = None
        self._drain_s = gateway.settings.server.drain_s
        self._draining = asyncio.Event()
        self._admin_frontend: HttpFrontend | None = None
        self._admin_http: HttpServer | None = None
        self._picker: PickerServer | None = None
        self._app = create_app(gateway)
        self._own = OwnPaths(self._app, gateway.relay.access, gateway.relay.new_request_id)
        self._admin_own: OwnPaths | None = None
        super().__init__(
            uvicorn.Config(
                self._own,
                http=cast("type[asyncio.Protocol]", self._connect),
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,  # the format of the gateway
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=math.ceil(self._drain_s) + 5,
            )
        )
        self._frontend = HttpFrontend(gateway.relay, self._own, self.server_state.tasks)
        self._http = HttpServer(
            self._frontend,
            server_limits(gateway.settings.server),
            writes=gateway.relay.writes,
            connections=self.server_state.connections,
        )
        self._served = gateway.settings, gateway.relay.access
        gateway.on_change.append(self._follow)

    def _follow(self) -> None:
        """Serve the requests that follow with the settings as they are now."""
        gateway, (settings, access) = self._gateway, self._served
        self._served = gateway.settings, gateway.relay.access
        self._own.use(gateway.relay.access)
        self._frontend.use(gateway.relay, gateway.relay.access)
        if self._admin_frontend is not None and self._admin_own is not None and gateway.admin_access is not None:
            self._admin_own.use(gateway.admin_access)
            self._admin_frontend.use(gateway.relay, gateway.admin_access)
        servers = [self._http, *([] if self._admin_http is None else [self._admin_http])]
        if access is not gateway.relay.access:
            for server in servers:
                server.forget_heads()
        if settings.server != gateway.settings.server:
            self._drain_s = gateway.settings.server.drain_s
            self.config.timeout_graceful_shutdown = math.ceil(self._drain_s) + 5
            for server in servers:
                server.limits = server_limits(gateway.settings.server)

    def _connect(self, **_: object) -> ServerConnection:
        """Return the protocol of a new connection; uvicorn passes what its own protocols need."""
        return self._http.connect()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        await super().startup(sockets)
        self._watch = background.keep_running("open files", _watch_open_files)
        if self._admin_socket is not None and self.started:
            self._admin_server = await self._serve_admin(self._admin_socket)
        if self._picker_socket is not None and self.started:
            self._picker = await _serve_picker(self._gateway, self._own, self._picker_socket)
        if self._has_process:
            tune_garbage_collector()
        if self._on_started is not None and self.started:
            self._on_started()

    async def serve_at(self, clients: socket.socket, *others: socket.socket) -> None:
        """Serve until `drain`: clients at one address, `/admin` and the endpoint picker at others if there are such."""
        sockets = list(others)
        if self._gateway.settings.picker is not None:
            self._picker_socket = sockets.pop()
        if sockets:
            self._admin_socket = sockets.pop()
        try:
            await self.serve(sockets=[clients])
        finally:
            if self._admin_server is not None:
                self._admin_server.close()
            for connection in list(self._admin_connections):
                connection.abort()

    async def _serve_admin(self, opened: socket.socket) -> asyncio.Server:
        relay, access = self._gateway.relay, self._gateway.admin_access
        assert access is not None
        self._admin_own = OwnPaths(self._app, access, relay.new_request_id)
        self._admin_frontend = HttpFrontend(relay, self._admin_own, self.server_state.tasks, access)
        limits = server_limits(self._gateway.settings.server)
        server = self._admin_http = HttpServer(self._admin_frontend, limits, connections=self._admin_connections)
        # The protocol does not inherit from `asyncio.Protocol`, so that mypyc can compile it.
        connect = cast("Callable[[], asyncio.Protocol]", server.connect)
        return await asyncio.get_running_loop().create_server(connect, sock=opened, backlog=_BACKLOG)

    async def main_loop(self) -> None:
        """Wait for `drain`; uvicorn looks ten times a second, and keeps header lines that only its protocols use."""
        await self._draining.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop serving."""
        if self._watch is not None:
            self._watch.cancel()
        if self._picker is not None:
            for server in self.servers:
                server.close()  # clients come no more while the picker's streams end
            await self._picker.stop(self._drain_s)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore signals; the process handles them."""
        yield

    def drain(self) -> None:
        """Stop accepting requests, and abort those still in flight after `drain_s`; a second call aborts them now."""
        if self.should_exit:
            self._gateway.relay.stop()
            self.force_exit = True
            return
        self.should_exit = True
        if self._picker is not None:
            self._picker.drain()
        self._draining.set()
        for drained in self._gateway.on_drain:
            drained()
        asyncio.get_running_loop().call_later(self._drain_s, self._gateway.relay.stop)


async def _serve_picker(gateway: Gateway, own: OwnPaths, opened: socket.socket) -> PickerServer:
    from gateway.picker.server import PickerServer  # needs the extra [picker]

    picker = PickerServer(gateway, own)
    await picker.start(opened)
    return picker


def server_limits(settings: ServerSettings) -> ServerLimits:
    """Return what the HTTP server accepts.

    Connections of clients are also bounded by half of the files that the process may open: the other half is for
    those to backends.
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
        head=HeadLimits(
            target_bytes=int(settings.max_target_kib * 2**10),
            headers_bytes=int(settings.max_headers_kib * 2**10),
            headers=settings.max_headers,
        ),
        body_bytes=settings.max_body_bytes,
        idle_s=_KEEP_ALIVE_S,
        head_s=settings.head_s,
        body_s=settings.body_s,
        connections=connections,
        unfinished_bytes=int(settings.max_unfinished_mib * 2**20),
    )


async def _watch_open_files() -> None:
    """Log when no more files can be opened; new connections are then closed by the event loop, which tells nobody."""
    again_s = 0.0
    while True:
        await asyncio.sleep(_FILES_CHECK_S)
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE} and time.monotonic() >= again_s:
                again_s = time.monotonic() + _LOG_EVERY_S
                log.warning("no more files can be opened (%s): new connections are closed", error.strerror)


def raise_open_file_limit() -> None:
    """Raise the limit on open files to its maximum: each stream needs two, and 1,024 is a common default."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def tune_garbage_collector() -> None:
    """Exclude existing objects from garbage collection, and collect new ones less often.

    Modules and long-lived objects stay until the process ends, and traversing them blocks all requests for tens of
    milliseconds. Requests and connections are freed by reference counting, which leaves few cycles to find.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def listen(host: str, port: int, *, shared: bool, checked: bool = False) -> socket.socket:
    """Return a bound socket to serve on."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, family=0, type=socket.SOCK_STREAM)[0]
    if shared and port and not checked:
        with socket.socket(
            family, kind, protocol
        ) as probe:  # SO_REUSEPORT would silently share a port with another program
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened
