"""A gRPC server: its services, its connections, and how it stops."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from gateway.http.server import SHED_SHARE
from gateway.picker.grpc.call import UNAVAILABLE, Call, Handler
from gateway.picker.grpc.connection import BEGIN_S, Connection

log = logging.getLogger(__name__)

SWEEP_S: Final = 1.0
"""Seconds between checks for connections whose time is over."""
MOST_CONNECTIONS: Final = 1024
MOST_HELD_BYTES: Final = 64 << 20
"""What all connections may hold of incomplete messages; the connections that hold the most are closed."""
_LOG_EVERY_S: Final = 10.0
_IDLE_AGAIN_S: Final = 0.05
"""Least seconds between two searches for idle connections."""
_BACKLOG: Final = 1024
_CLOSE_S: Final = 1.0
"""Seconds that a peer has to receive the last that it is sent."""


class GrpcServer:
    """Serves methods of gRPC."""

    def __init__(self, methods: Mapping[str, Callable[[Call], Handler]]) -> None:
        # By path, what returns the handler of a new call.
        self._methods = {path.encode(): begin for path, begin in methods.items()}
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._is_empty: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._held_bytes = 0
        self._idlest: list[tuple[float, Connection]] = []  # the last is idle for longest
        self._idlest_again_s = 0.0
        self._faults = 0
        self._log_again_s = 0.0
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
        if len(self.connections) >= MOST_CONNECTIONS and not self._close_idlest():
            connection.abort()
            return
        self.connections.add(connection)
        if self._is_stopping:
            connection.shutdown()

    def _close_idlest(self) -> bool:
        """Close the connection that has been idle for longest; return False if all have calls.

        It goes rather than a new one, which may be the proxy's.
        """
        now_s = time.monotonic()
        if not self._idlest and now_s >= self._idlest_again_s:
            self._idlest_again_s = now_s + _IDLE_AGAIN_S
            idle = [(each.idle_since_s(), each) for each in self.connections]
            self._idlest = sorted((each for each in idle if each[0] < now_s), key=_since_s, reverse=True)
        while self._idlest:
            since_s, connection = self._idlest.pop()
            if connection in self.connections and connection.idle_since_s() == since_s:
                self.connections.discard(connection)
                connection.abort()
                return True
        return False

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self.hold(connection)
        if self._is_empty is not None and not self.connections and not self._is_empty.done():
            self._is_empty.set_result(None)

    def hold(self, connection: Connection) -> None:
        """Count what a connection holds of incomplete messages, and close those that hold the most above the bound."""
        self._held_bytes += connection.held_bytes - connection.counted_bytes
        connection.counted_bytes = connection.held_bytes
        if self._held_bytes > MOST_HELD_BYTES:
            for largest in sorted(self.connections, key=_held_bytes, reverse=True):
                if self._held_bytes <= SHED_SHARE * MOST_HELD_BYTES:
                    break
                self.note_fault("incomplete messages hold too much: the connections that hold the most are closed")
                self._held_bytes -= largest.counted_bytes
                largest.counted_bytes = 0
                largest.abort()

    def note_fault(self, text: str) -> None:
        """Log why a connection ends, every now and then: whoever connects can make it do so."""
        self._faults += 1
        now_s = time.monotonic()
        if now_s >= self._log_again_s:
            log.info("%d connections end, the last one: %s", self._faults, text)
            self._faults, self._log_again_s = 0, now_s + _LOG_EVERY_S

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


def _since_s(idle: tuple[float, Connection]) -> float:
    return idle[0]


def _held_bytes(connection: Connection) -> int:
    return connection.held_bytes
