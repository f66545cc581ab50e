"""A gRPC server: its services, its connections, and how it stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from gateway.picker.grpc.call import UNAVAILABLE, Call, Handler
from gateway.picker.grpc.connection import BEGIN_S, Connection

SWEEP_S: Final = 1.0
"""Seconds between checks for connections whose time is over."""
MOST_CONNECTIONS: Final = 1024
_BACKLOG: Final = 1024
_CLOSE_S: Final = 1.0
"""Seconds that a peer has to receive the last that it is sent."""


class GrpcServer:
    """Serves methods of gRPC.

    Parameters
    ----------
    methods
        By path, what returns the handler of a new call.
    """

    def __init__(self, methods: Mapping[str, Callable[[Call], Handler]]) -> None:
        self._methods = {path.encode(): begin for path, begin in methods.items()}
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._is_empty: asyncio.Future[None] | None = None
        self._is_stopping = False
        self.connections: set[Any] = set()

    async def start(self, opened: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections at a bound socket."""
        loop = asyncio.get_running_loop()
        # The protocol does not inherit from `asyncio.Protocol`, so that mypyc can compile it.
        connect = cast("Callable[[], asyncio.Protocol]", self.connect)
        limits: dict[str, Any] = {}
        if tls is not None:
            # Clients of gRPC leave the end of TLS unanswered; the default is to wait 30 s for it.
            limits = {"ssl": tls, "ssl_handshake_timeout": BEGIN_S, "ssl_shutdown_timeout": _CLOSE_S}
        self._server = await loop.create_server(connect, sock=opened, backlog=_BACKLOG, **limits)
        self._sweep = loop.call_later(SWEEP_S, self._check)

    def connect(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self)

    def begin(self, path: bytes, call: Call) -> Handler | None:
        """Return what answers a call to a path; None if there is nothing there."""
        begin = self._methods.get(path)
        return None if begin is None else begin(call)

    def opened(self, connection: Connection) -> None:
        """Register a new connection, once any TLS handshake is complete.

        Not earlier: asyncio does not report failed handshakes, so those connections would never be removed.
        """
        self.connections.add(connection)
        if len(self.connections) > MOST_CONNECTIONS:
            connection.abort()
        elif self._is_stopping:
            connection.shutdown()

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        if self._is_empty is not None and not self.connections and not self._is_empty.done():
            self._is_empty.set_result(None)

    def _check(self) -> None:
        now_s = time.monotonic()
        for connection in list(self.connections):
            connection.check(now_s)
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check)

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, wait for those that there are, and end the rest."""
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.shutdown()
        await self._wait_for_the_last(grace_s)
        for connection in list(self.connections):
            connection.end(UNAVAILABLE, "The server is being stopped.")
        await self._wait_for_the_last(_CLOSE_S)
        for connection in list(self.connections):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()

    async def _wait_for_the_last(self, limit_s: float) -> None:
        if self.connections:
            self._is_empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._is_empty], timeout=limit_s)
