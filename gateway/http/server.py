"""An HTTP/1.1 server over asyncio protocols: what its connections share.

A complete request goes to a `Service` in the call that read its last byte, and the answer to the socket in the call
that produced it: no task, no queue. Everything kept of a request, and every wait for a client, is bounded.
`gateway.http.connection` reads the requests.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from backends import background
from backends.background import Seldom
from backends.http.wire import WriteBatch
from gateway.http.reply import Connection, DateLine, HttpReply
from gateway.http.request_head import HeadLimits

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Seconds between checks for connections that have timed out."""
_OVERFLOW_CONNECTIONS = 64
"""Connections above the limit that get an error; further ones are just closed."""
_MOST_IDLE = 1024
_IDLE_AGAIN_S = 0.05
"""Least seconds between two searches for idle connections, since each scans all connections."""
SHED_SHARE = 7 / 8
"""Share of the limit down to which unfinished requests are refused, so that searches for them are rare."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server."""

    head: HeadLimits = field(default_factory=HeadLimits)  # bounds of the head of a request
    body_bytes: int = 32 * 2**20  # size of a request body
    idle_s: float = 75.0  # seconds that a connection may be idle between requests
    # Seconds from the first byte of a head to its last, and from the beginning of a connection to its first byte.
    head_s: float = 30.0
    body_s: float = 300.0  # seconds from the head to the last byte of the body
    # Seconds that a client may take to send any of a body, or to receive any of an answer.
    stall_s: float = 60.0
    # Most connections. Another one evicts the one idle for longest; if none is idle, it is refused. A connection is
    # idle until the head of a request is complete, so incomplete heads keep nobody out.
    connections: int = 10_000
    # Most bytes of unfinished requests, over all connections. Above it, the largest is refused.
    unfinished_bytes: int = 256 * 2**20


class Service(Protocol):
    """Serves the requests of a server. Each method may answer the request immediately."""

    def admit(self, reply: HttpReply) -> None:
        """Check a request by its head, before its body is read; an answer refuses it.

        It is not called again for a head that it admitted earlier on the same connection.
        """

    def handle(self, reply: HttpReply, body: bytes) -> None:
        """Handle a complete request."""

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        """Answer a request that the server does not accept."""


class HttpServer:
    """What the connections of a server share."""

    def __init__(self, service: Service, limits: ServerLimits, writes: WriteBatch | None = None) -> None:
        self.service = service
        self.limits = limits
        self.writes = writes or WriteBatch()  # batches the writes of whole answers
        self.is_stopping = False  # whether the server is stopping: no connection accepts another request
        self.connections: set[Connection] = set()  # the open ones
        self.date = DateLine()
        self._sweep: Any = None
        self._held_bytes = 0
        self._idlest: list[tuple[float, Connection]] = []  # the last has been idle for longest
        self._idlest_again_s = 0.0
        self._warned = Seldom()

    def change(self, limits: ServerLimits) -> None:
        """Replace the limits; ask the service about the next request of each connection, as its answer may change."""
        self.limits = limits
        for connection in self.connections:
            connection.follow_limits()

    def shutdown(self) -> None:
        """Close each connection once its current request, or one that may be on its way, has been answered."""
        self.is_stopping = True
        for connection in list(self.connections):
            connection.shutdown()

    def register(self, connection: Connection) -> bool:
        """Track a connection until it is lost, and check its timeouts; return whether there is room for it."""
        connections, limit = self.connections, self.limits.connections
        while len(connections) >= limit and self._close_idlest():
            pass
        has_room = len(connections) < limit
        connections.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check)
        if not has_room:
            self._warn(f"all {limit} connections are in use: new ones are refused")
        return has_room

    def is_overfull(self) -> bool:
        """Return whether there are too many connections to send another one an error."""
        return len(self.connections) > self.limits.connections + _OVERFLOW_CONNECTIONS

    def _close_idlest(self) -> bool:
        """Close the connection that has been idle for longest; return False if none is idle."""
        now_s = time.monotonic()
        while True:
            while self._idlest:
                since_s, connection = self._idlest.pop()
                if connection.idle_since_s() == since_s:
                    self.connections.discard(connection)
                    connection.abort()
                    return True
            if now_s < self._idlest_again_s:
                return False
            self._idlest_again_s = now_s + _IDLE_AGAIN_S
            idle: list[tuple[float, Connection]] = []
            for connection in self.connections:
                since_s = connection.idle_since_s()
                if since_s < now_s:
                    idle.append((since_s, connection))
            self._idlest = heapq.nsmallest(_MOST_IDLE, idle, key=itemgetter(0))
            self._idlest.reverse()

    def hold(self, more_bytes: int) -> None:
        """Count more bytes of unfinished requests, or fewer, and refuse the largest ones above the limit."""
        self._held_bytes += more_bytes
        if more_bytes > 0 and self._held_bytes > self.limits.unfinished_bytes:
            self._shed()

    def _shed(self) -> None:
        limit_bytes = self.limits.unfinished_bytes
        self._warn(f"unfinished requests hold more than {limit_bytes} bytes: the largest are refused")
        for connection in sorted(self.connections, key=attrgetter("held_bytes"), reverse=True):
            if self._held_bytes <= SHED_SHARE * limit_bytes:
                break
            connection.shed()

    def _warn(self, text: str) -> None:
        """Log a warning, once a minute."""
        if self._warned.may_say(text):
            log.warning("%s", text)

    def close(self, transport: Any) -> None:
        """Close a transport after its pending writes."""
        self.writes.flush()
        transport.close()

    def _check(self) -> None:
        """Check the timeouts of all connections; one timer for all saves two timer changes per request."""
        now_s = time.monotonic()
        for connection in list(self.connections):
            try:
                connection.check(now_s)
            except Exception as error:  # noqa: BLE001 -- the others must still be checked
                background.note("connections", error)
                connection.abort()
        running = bool(self.connections)
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check) if running else None
