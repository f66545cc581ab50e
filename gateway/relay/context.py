"""The state of the gateway process that exchanges share.

The hot path consists of callbacks on one event loop. A frontend (`gateway.relay.frontend`) begins an exchange with a
`Reply`; the upstream client calls it with the answer; the call that reads a chunk also passes it on. Nothing on this
path waits for a file, a scrape or a fit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from backends import background
from backends.backend import Backend
from backends.health import Books
from backends.http.wire import WriteBatch
from backends.pool import Pool
from gateway.dialects.errors import GatewayError
from gateway.http.headers import Header, lines_of
from gateway.http.paths import canonical_path
from gateway.relay.limits import Limits
from gateway.relay.observers import Follower
from gateway.relay.roles import Ongoing, Refused, Reply, Reporting, Rescuer, send_error
from gateway.relay.waiting.first_start import FirstStart
from gateway.relay.waiting.queue import ModelQueue
from gateway.routing.access import Access, RequestHeaders
from gateway.routing.large_bodies import Turns
from gateway.routing.lookups import Lookups
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import Narrowing, Router
from gateway.routing.series import RequestSeries

_IDS_AT_ONCE: Final = 256
_TOGETHER_S: Final = 1.0
STOPPING: Final = "gateway_stopping"
"""Error code of requests still in flight when the drain time is over."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a backend may be silent, and a request may take."""

    first_byte_s: float  # seconds from sending the request to the first byte of the answer
    idle_s: float  # seconds between two reads of the answer
    total_s: float = math.inf  # seconds from the arrival of a request to the end of its answer


RescuerFor = Callable[[RequestHeaders, bytes, RoutedRequest], Rescuer]
"""Returns the rescuer of a request's stream, from its head, its body and its routing."""


@dataclass(eq=False)
class RelayContext:
    """The state shared by all exchanges of a gateway process.

    A reload replaces the first four in a copy: exchanges in flight keep theirs, and both copies share `exchanges`.
    """

    router: Router
    access: Access
    timeouts: Timeouts
    queues: dict[str, ModelQueue]  # the queues of the models that have one, by name
    pool: Pool
    limits: Limits
    metrics: RequestSeries
    writes: WriteBatch
    exchanges: set[Ongoing] = field(default_factory=set)  # the exchanges in flight
    lookups: Lookups = field(default_factory=Lookups)  # of stored responses whose backend is unknown here
    turns: Turns = field(default_factory=Turns)  # where large bodies are parsed one after another
    # Where requests wait for the first replica of their model.
    first_start: FirstStart = field(default_factory=FirstStart)
    # followers: observe the exchanges of a model, by its name; rescuer_for: returns what resumes a stream elsewhere;
    # reporter: reports requests to the outside. None if no room does.
    followers: dict[str, list[Follower]] = field(default_factory=dict)
    rescuer_for: RescuerFor | None = None
    reporter: Reporting | None = None
    _ids: list[bytes] = field(default_factory=list)

    def join(
        self,
        followers: dict[str, list[Follower]],
        rescuer_for: RescuerFor | None,
        reporter: Reporting | None,
        narrowing: dict[str, Narrowing],
    ) -> None:
        """Connect the rooms, which need the relay and so cannot exist before it."""
        self.router.narrow_by(narrowing)
        self.followers, self.rescuer_for, self.reporter = followers, rescuer_for, reporter

    def new_request_id(self) -> bytes:
        """Return 32 random hex digits, so that nobody can guess the ids of others and claim them first."""
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
        """Count a request that was refused before routing: for its head, a limit, or an unknown model."""
        self.metrics.count_refusal()
        if self.reporter is not None:
            self.reporter.refuse(refused, error)

    def ready(self, backend: Backend) -> None:
        """Send waiting requests, since a backend may take more."""
        self.first_start.ready(backend)
        if (queue := self.queues.get(backend.model)) is not None:
            queue.dispatch()

    def abandon(self, backend: Backend) -> None:
        """Retry the exchanges that wait for the first byte of a backend which went down."""
        self._for_each(lambda exchange: exchange.backend_is_down(backend))

    def books(self, backend: Backend) -> Books:
        """Return what the requests in flight at a backend show about it."""
        now_s = time.perf_counter()
        attempts = [each.attempt for each in self.exchanges]
        found = [each.silence_of(backend, now_s) for each in attempts if each is not None]
        waiting = [each for each in found if each is not None]
        silent_s = max((each.seconds for each in waiting), default=0.0)
        prompt_tokens = 0
        if silent_s > self.pool.rules.silence_s:
            # Prompts sent after the first one would not have delayed it.
            together = [each.prompt_tokens for each in waiting if each.seconds > silent_s - _TOGETHER_S]
            prompt_tokens = max(together)
        return Books(backend.read_s, silent_s, prompt_tokens)

    def sweep(self) -> None:
        """Check all exchanges for silent backends and expired waits; called about twice a second."""
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

    def _for_each(self, call: Callable[[Ongoing], None]) -> None:
        """Call a function for each exchange in flight, even if one raises."""
        for exchange in list(self.exchanges):
            with background.guarded("requests"):
                call(exchange)
