"""The HTTP server of a gateway process: uvicorn with its own handling of signals and draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import socket
from collections.abc import Iterator
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
    """

    def __init__(
        self, gateway: Gateway, worker_messages: WorkerMessages, *, fast: bool = True, has_process: bool = False
    ) -> None:
        self._gateway = gateway
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
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(self._drain_s) + 5,
            )
        )
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
        if self._has_process:
            tune_garbage_collector()

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
