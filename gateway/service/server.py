"""The HTTP server of a gateway process: uvicorn with its own handling of signals and draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import socket
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn

from backends.http.server import HttpServer, ServerConnection, ServerLimits
from gateway.frontend.http import HttpFrontend
from gateway.service.app import Application, max_body_bytes
from gateway.service.assembly import Gateway
from gateway.service.worker_messages import WorkerMessages

_BACKLOG = 2048
_GC_THRESHOLD = 20_000  # more objects than a thousand requests in flight hold
_KEEP_ALIVE_S = 75  # longer than the idle time of clients' pools, so that the client closes first


class Server(uvicorn.Server):
    """The HTTP server of one gateway process, on sockets that are already open.

    uvicorn raises the signal that stopped it again. This server stops only through `drain`, so that the process can
    stop its replicas and exit with status 0.

    Parameters
    ----------
    fast
        Whether `gateway.frontend.http` serves, which relays requests without ASGI; else uvicorn's protocol does.
    has_process
        Whether the process serves nothing else, so that its garbage collector can be tuned.
    on_started
        Called once connections are accepted.
    """

    def __init__(
        self,
        gateway: Gateway,
        worker_messages: WorkerMessages,
        *,
        fast: bool = True,
        has_process: bool = False,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        self._gateway = gateway
        self._on_started = on_started
        self._admin_socket: socket.socket | None = None
        self._admin_server: asyncio.Server | None = None
        self._admin_connections: set[ServerConnection] = set()  # not uvicorn's: they do not hold up draining
        self._has_process = has_process
        self._drain_s = gateway.settings.server.drain_s
        app = Application(gateway, worker_messages)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", self._connect) if fast else "httptools",
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,  # the format of the gateway
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(self._drain_s) + 5,
            )
        )
        self._app = app
        self._http = HttpServer(
            HttpFrontend(gateway.relay, app, self.server_state.tasks),
            ServerLimits(body_bytes=max_body_bytes(gateway), idle_s=_KEEP_ALIVE_S),
            writes=gateway.relay.writes,
            connections=self.server_state.connections,
        )

    def _connect(self, **_: object) -> ServerConnection:
        """Return the protocol of a new connection; uvicorn passes what its own protocols need."""
        return self._http.connect()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        await super().startup(sockets)
        if self._admin_socket is not None and self.started:
            self._admin_server = await self._serve_admin(self._admin_socket)
        if self._has_process:
            tune_garbage_collector()
        if self._on_started is not None and self.started:
            self._on_started()

    async def serve_at(self, clients: socket.socket, admin: socket.socket | None = None) -> None:
        """Serve until `drain`: clients at one address, and `/admin` at another if there is one."""
        self._admin_socket = admin
        try:
            await self.serve(sockets=[clients])
        finally:
            if self._admin_server is not None:
                self._admin_server.close()
            for connection in list(self._admin_connections):
                connection.abort()

    async def _serve_admin(self, opened: socket.socket) -> asyncio.Server:
        assert self._app.admin is not None
        frontend = HttpFrontend(
            self._gateway.relay, self._app.admin, self.server_state.tasks, self._gateway.admin_access
        )
        limits = ServerLimits(body_bytes=max_body_bytes(self._gateway), idle_s=_KEEP_ALIVE_S)
        server = HttpServer(frontend, limits, connections=self._admin_connections)
        # The protocol does not inherit from `asyncio.Protocol`, so that mypyc can compile it.
        connect = cast("Callable[[], asyncio.Protocol]", server.connect)
        return await asyncio.get_running_loop().create_server(connect, sock=opened, backlog=_BACKLOG)

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
        asyncio.get_running_loop().call_later(self._drain_s, self._gateway.relay.stop)


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
    """Return a bound socket to serve on.

    Parameters
    ----------
    shared
        Whether several worker processes listen on the same port (SO_REUSEPORT).
    checked
        Whether the port is known to be reserved for this gateway, as it is in a worker.

    Raises
    ------
    OSError
        If the address does not belong to this machine or the port is in use.
    """
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
