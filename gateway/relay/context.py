"""What exchanges share: the inbound request, the reply to write to, and the state of the gateway process.

The hot path consists of callbacks on one event loop. A frontend (`gateway.relay.frontend`) begins an `Exchange` with a
`Reply`; the upstream client calls it with the answer; each chunk is passed on in the same call that read it. Nothing on
this path waits for a file, a scrape or a fit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from backends import background
from backends.backend import Backend
from backends.health import Books
from backends.http.wire import WriteBatch
from backends.pool import Pool
from gateway.dialects.errors import GatewayError
from gateway.dialects.sse import EventStream
from gateway.http.headers import Header, lines_of, request_id_lines
from gateway.http.paths import canonical_path, format_of
from gateway.relay.failures import Outlook
from gateway.relay.first_start import FirstStart
from gateway.relay.limits import Limits
from gateway.relay.lookups import Lookups
from gateway.relay.observers import EndedExchange, Follower, Observer
from gateway.relay.queue import ModelQueue
from gateway.routing.access import Access, RequestHeaders
from gateway.routing.large_bodies import Turns
from gateway.routing.router import Router
from gateway.routing.series import RequestSeries
from policies.features.request import Endpoint

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

_OTHER: Final = Endpoint.OTHER
_IDS_AT_ONCE: Final = 256
_TOGETHER_S: Final = 1.0
STOPPING: Final = "gateway_stopping"
"""The code of the error that ends what is in flight when the drain time is over."""


class Reply(Protocol):
    """The client's side of an exchange, implemented by a frontend."""

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer with its status and header lines."""

    def data(self, chunk: bytes) -> None:
        """Send bytes of the body at once."""

    def end(self) -> None:
        """End the answer."""

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a complete answer; `lines` lack its content length."""

    def abort(self) -> None:
        """Close the connection, which shows the client that the answer is incomplete."""


def send_error(reply: Reply, error: GatewayError, path: str, request_id: bytes, lines: bytes = b"") -> None:
    """Answer with an error in the format of a path's API; `lines` are further header lines."""
    lines = lines_of(error.headers()) + request_id_lines(path, request_id) + lines
    reply.whole(error.status, lines, error.body(format_of(path)))


class Inbound:
    """A request as a frontend received it."""

    def __init__(self, request_headers: RequestHeaders, body: bytes) -> None:
        self.request_headers = request_headers
        self.path = request_headers.path  # canonical path, without the query
        self.target = request_headers.target  # canonical path and query
        # Header lines for the next backend: those of the client, unless the gateway takes part in its trace.
        self.lines = request_headers.lines
        self.body = body
        # The request's id for engines, which may refuse an id that another request has; set by the exchange. A client's
        # own stands at its end, after random digits.
        self.engine_id = b""
        self.arrived_s = time.perf_counter()  # arrival of the last byte, by `time.perf_counter`

    def fingerprint(self) -> int:
        """Return a number by which the pool recognizes the request if it is sent again."""
        return hash((self.target, self.body))


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a backend may be silent, and a request may take.

    Examples
    --------
    >>> Timeouts(idle_s=30.0)
    Timeouts(first_byte_s=600.0, idle_s=30.0, total_s=inf)
    """

    first_byte_s: float = 600.0  # seconds from sending the request to the first byte of the answer
    idle_s: float = 60.0  # seconds between two reads of the answer
    total_s: float = math.inf  # seconds from the arrival of a request to the end of its answer


class Rescuer(Protocol):
    """What has other backends go on with the stream of one request whose backend fails: `gateway.rooms.rescue`."""

    left: list[str]  # the backends that failed in the middle of the stream
    is_waiting: bool  # whether the backend that is to go on has not sent anything yet

    @property
    def body(self) -> bytes | None:
        """The body that is sent in place of the request's; None if no other backend could go on with it."""

    @property
    def has_ids(self) -> bool:
        """Whether the engine has told the ids of tokens."""

    def watch(self, events: EventStream) -> None:
        """Follow the events of a stream that begins."""

    def outlook(self) -> Outlook:
        """Return what can be done for the rest of the stream."""

    def go_on(self, candidates: list[Backend], message: str) -> None:
        """Have one of the candidates go on with the stream; `message` is what the present backend did."""

    def close(self) -> None:
        """Write the end that is missing of a stream whose whole text has been passed on."""

    def note_lost(self) -> None:
        """Count a stream that is lost with its backend."""

    def note(self, ended: EndedExchange) -> None:
        """Record at the end of the exchange where its stream began, and count what came of it."""


class Reporting(Protocol):
    """What reports requests outside: `gateway.rooms.reports`."""

    def follow(self, inbound: Inbound, request_id: bytes) -> Sequence[Observer]:
        """Return who observes a request that was routed; nobody if it is not of interest."""

    def refuse(self, refused: Refused, error: GatewayError) -> None:
        """Report a request that was refused before it was routed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was refused before it was routed."""

    request_id: bytes
    method: str
    path: str
    lines: bytes  # its header lines
    arrived_s: float
    client: str = ""  # name of its key; empty if that is not known


class RelayContext:
    """The state shared by all exchanges of a gateway process."""

    def __init__(
        self,
        router: Router,
        pool: Pool,
        access: Access,
        limits: Limits,
        metrics: RequestSeries,
        timeouts: Timeouts,
        writes: WriteBatch,
    ) -> None:
        self.router = router
        self.pool = pool
        self.access = access
        self.limits = limits
        self.metrics = metrics
        self.timeouts = timeouts
        self.writes = writes
        self.exchanges: set[Exchange] = set()  # the exchanges in flight
        self.followers: dict[str, list[Follower]] = {}  # what observes the exchanges of a model, by its name
        self.queues: dict[str, ModelQueue] = {}  # the queues of the models that have one, by name
        # Returns what goes on with the streams of a request elsewhere; None if nothing does.
        self.rescuer_for: Callable[[Exchange], Rescuer] | None = None
        self.reporter: Reporting | None = None  # what reports requests outside; None if nothing does
        self.lookups = Lookups()  # of stored responses that are not known here
        self.turns = Turns()  # where large bodies are parsed one after another
        self.first_start = FirstStart()  # where requests wait for the first replica of their model
        self._ids: list[bytes] = []

    def successor(self, router: Router, access: Access, timeouts: Timeouts) -> RelayContext:
        """Return the context of later exchanges; those in flight keep theirs, and are in `exchanges` of both."""
        later = RelayContext(router, self.pool, access, self.limits, self.metrics, timeouts, self.writes)
        later.exchanges, later.reporter = self.exchanges, self.reporter
        later.turns, later.lookups, later.first_start = self.turns, self.lookups, self.first_start
        later.rescuer_for = self.rescuer_for
        return later

    def new_request_id(self) -> bytes:
        """Return 32 random hex digits: nobody can know the ids of others, and take them first."""
        if not self._ids:
            digits = os.urandom(16 * _IDS_AT_ONCE).hex().encode()
            self._ids = [digits[at : at + 32] for at in range(0, len(digits), 32)]
        return self._ids.pop()

    def refuse(
        self, reply: Reply, access: Access, error: GatewayError, method: str, target: bytes, headers: list[Header]
    ) -> None:
        """Answer a request whose head was refused."""
        path = canonical_path(target) or target.partition(b"?")[0].decode("latin-1")
        request_id = dict(headers).get(b"x-request-id") or self.new_request_id()
        self.note_refused(Refused(request_id, method, path, lines_of(headers), time.perf_counter()), error)
        send_error(reply, error, path, request_id, access.lines_of_refusal(target, headers))

    def note_refused(self, refused: Refused, error: GatewayError) -> None:
        """Count a request that was refused before routing: its head, or over a limit, or for an unknown model."""
        self.metrics.count_refusal()
        if self.reporter is not None:
            self.reporter.refuse(refused, error)

    def ready(self, backend: Backend) -> None:
        """Send requests that wait, since a backend may take more."""
        self.first_start.ready(backend)
        if (queue := self.queues.get(backend.model)) is not None:
            queue.dispatch()

    def abandon(self, backend: Backend) -> None:
        """Retry on other backends the exchanges that wait for the first byte from a backend that went down."""
        self._for_each(lambda exchange: exchange.backend_is_down(backend))

    def books(self, backend: Backend) -> Books:
        """Return what the requests in flight at a backend tell of it."""
        now_s = time.perf_counter()
        waiting: list[tuple[float, Exchange]] = []
        for exchange in self.exchanges:
            attempt = exchange.attempt
            if attempt is None or attempt.upstream.backend is not backend or exchange.delivery.endpoint is _OTHER:
                continue
            if attempt.call is not None and not attempt.call.paused:
                waiting.append((now_s - attempt.last_read_s, exchange))
        silent_s = max((waited_s for waited_s, _ in waiting), default=0.0)
        prompt_tokens = 0
        if silent_s > self.pool.rules.silence_s:
            for waited_s, exchange in waiting:  # what was sent later than the first would not have held it up
                if waited_s > silent_s - _TOGETHER_S and not exchange.delivery.times.first_s and exchange.routed:
                    prompt_tokens = max(prompt_tokens, exchange.routed.features.prompt_tokens)
        return Books(backend.read_s, silent_s, prompt_tokens)

    def sweep(self) -> None:
        """Check all exchanges for silent backends and waits that are over; called about once a second."""
        now_s = time.perf_counter()
        self._for_each(lambda exchange: exchange.check_silence(now_s))
        self.first_start.end_overdue(now_s)
        for queue in self.queues.values():
            with background.guarded("requests", of=f"the queue of {queue.model}"):
                queue.end_overdue(now_s)
                queue.dispatch()  # a backend in slow start may take more as time passes

    def stop(self) -> None:
        """End the exchanges still in flight when the drain time is over."""
        for queue in self.queues.values():
            queue.close()
        error = GatewayError(503, "The gateway is stopping. Send the request again.", code=STOPPING, retry_after_s=1.0)
        self._for_each(lambda exchange: exchange.end_with_error(error))

    def _for_each(self, call: Callable[[Exchange], None]) -> None:
        """Call a function for each exchange in flight, also after one of them has raised."""
        for exchange in list(self.exchanges):
            with background.guarded("requests"):
                call(exchange)
