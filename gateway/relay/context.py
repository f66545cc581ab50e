"""What the hot path shares: the request as a door read it, the reply it wants, and the exchanges under way.

Everything there is callbacks on one loop: a door (see `gateway.frontend`) begins an `Exchange` with a `Reply`
to write to, the upstream client tells of the answer, and each chunk goes on in the same call that read it. Nothing on
this way waits for a file, a scrape or a fit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from backends.backend import Backend
from backends.http.write_batch import WriteBatch
from backends.pool import Pool
from gateway.http.errors import GatewayError
from gateway.http.headers import Header
from gateway.recorder import Recorder
from gateway.relay.limits import Limits
from gateway.routing.keys import STRANGER, Client, Keyring
from gateway.routing.request_head import RequestHeaders
from gateway.routing.router import Router
from gateway.telemetry.metrics import Metrics
from policies.policy import Outcome


class Reply(Protocol):
    """The client's side of an exchange, as a door offers it."""

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer, with its headers as lines."""

    def data(self, chunk: bytes) -> None:
        """Send bytes of its body, now."""

    def end(self) -> None:
        """End it well."""

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send all of an answer; its length is not among the lines."""

    def cut(self) -> None:
        """Break the connection off: what was sent is not whole, and the client must notice."""


class Inbound:
    """A request as a door read it.

    Parameters
    ----------
    request_headers
        What its headers tell.
    target
        Path and query as they came.

    Attributes
    ----------
    arrived_s
        When its last byte came, on the clock of `time.perf_counter`.
    """

    __slots__ = ("arrived_s", "body", "path", "request_headers", "target")

    def __init__(self, request_headers: RequestHeaders, path: str, target: bytes, body: bytes) -> None:
        self.request_headers = request_headers
        self.path = path
        self.target = target
        self.body = body
        self.arrived_s = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long an exchange may be silent, in seconds: before its first byte, and between two later ones."""

    first_byte_s: float = 600.0
    idle_s: float = 60.0


class Ongoing(Protocol):
    """An exchange under way, as the relay sees it."""

    def backend_is_down(self, backend: Backend) -> None:
        """Go elsewhere if nothing was answered yet, and it is this backend that should."""

    def check_silence(self, now_s: float) -> None:
        """Fail if the backend has been silent for longer than it may."""

    def break_off(self, error: GatewayError) -> None:
        """End with an error."""


class RelayContext:
    """What all exchanges of a gateway process share, and those that are under way."""

    def __init__(
        self,
        router: Router,
        pool: Pool,
        keyring: Keyring,
        limits: Limits,
        metrics: Metrics,
        timeouts: Timeouts,
        writes: WriteBatch,
    ) -> None:
        self.router = router
        self.pool = pool
        self.keyring = keyring
        self.limits = limits
        self.metrics = metrics
        self.timeouts = timeouts
        self.writes = writes
        self.exchanges: set[Ongoing] = set()
        self.listeners: list[Callable[[Outcome], None]] = []
        self.recorder: Recorder | None = None
        self._id_prefix = os.urandom(8).hex().encode()
        self._id_numbers = count()

    def request_headers(self, method: str, headers: list[Header]) -> RequestHeaders:
        """Read the headers of a request; raises as `identify` does."""
        return RequestHeaders.read(method, headers, self.identify)

    def identify(self, method: str, headers: Mapping[bytes, bytes]) -> Client:
        """Tell who sends a request, before its body is read.

        A browser's preflight (OPTIONS) carries no key, and vLLM asks it for none.

        Raises
        ------
        GatewayError
            401 without a valid key.
        """
        return STRANGER if method == "OPTIONS" else self.keyring.identify(headers)

    def new_request_id(self) -> bytes:
        """Return 32 hex digits that no other request has, here or in another process."""
        return b"%b%016x" % (self._id_prefix, next(self._id_numbers))

    def abandon(self, backend: Backend) -> None:
        """Send what waits for its first byte from a backend that went down to another one."""
        for exchange in list(self.exchanges):
            exchange.backend_is_down(backend)

    def sweep(self) -> None:
        """End the exchanges whose backend has been silent for too long; called every second or so."""
        now_s = time.perf_counter()
        for exchange in list(self.exchanges):
            exchange.check_silence(now_s)

    def stop(self) -> None:
        """Break off what is still under way: the time to drain is over."""
        error = GatewayError(
            503, "The gateway is stopping. Send the request again.", code="gateway_stopping", retry_after_s=1.0
        )
        for exchange in list(self.exchanges):
            exchange.break_off(error)
