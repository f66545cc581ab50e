"""One request of which a proxy carries the bytes: the gateway chooses its backend, and sees the answer go by."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import ClassVar, Final, Protocol

from backends.backend import Backend
from backends.http.client import Call
from backends.http.receiver import HeaderList
from gateway.config.settings import PickerSettings
from gateway.dialects.errors import GatewayError
from gateway.http.headers import request_id_lines
from gateway.relay.attempt import Attempt
from gateway.relay.context import STOPPING, Inbound, RelayContext, Reply
from gateway.relay.exchange import Exchange
from gateway.relay.observers import tell
from gateway.rooms.picker.destinations import Destinations
from gateway.routing.model import Upstream
from policies.features.request import Endpoint
from policies.policy import Decision


class Proxy(Reply, Protocol):
    """The proxy's side of an exchange; of the answer it gets errors only."""

    def forward(self, upstream: Upstream, destinations: str) -> None:
        """Have the request sent to the first of some destinations, which is a backend's, or to the next if it fails."""

    def leave(self) -> None:
        """Leave the rest of the answer to the proxy."""


class PickedExchange(Exchange):
    """An exchange whose request is sent, and whose answer is passed on, by a proxy.

    Admission, choice and accounting are those of the relay. Retries are the proxy's: it has been told where else the
    request may go.
    """

    is_relayed: ClassVar[bool] = False

    def __init__(
        self,
        relay: RelayContext,
        inbound: Inbound,
        proxy: Proxy,
        destinations: Destinations,
        subset: Collection[str] | None,
        settings: PickerSettings,
    ) -> None:
        super().__init__(relay, inbound, proxy)
        self._proxy = proxy
        self._destinations = destinations
        self._subset = subset  # the destinations that the proxy allows; None for all
        self._fallbacks = settings.fallbacks
        self._is_sampled = random.random() < settings.answers  # whether a policy that learns is to see the answer
        self._is_read = False

    # The request

    def refuse(self, error: GatewayError) -> None:
        """Answer a request that was not admitted."""
        super().refuse(as_shed(error))

    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends that the request may be sent to: those whose destination is known and allowed."""
        candidates = super().candidates(tried, may_try=may_try)
        allowed = [backend for backend in candidates if self._is_allowed(backend)]
        if not allowed and may_try:  # the backend on trial, which alone was left, may not be among those allowed
            allowed = [each for each in super().candidates(tried, may_try=False) if self._is_allowed(each)]
        if not allowed:
            of = "that the proxy allows is up" if self._subset is not None else "has a known address"
            raise GatewayError(503, f"No endpoint {of}. Try again shortly.", code="no_backend", retry_after_s=2.0)
        return allowed

    def _is_allowed(self, backend: Backend) -> bool:
        destination = self._destinations.of(backend)
        return destination != "" and (self._subset is None or destination in self._subset)

    def call(self, attempt: Attempt, candidates: list[Backend]) -> Call:
        """Have the proxy send the request to the backend of an attempt, or else to another candidate."""
        chosen = attempt.upstream.backend
        others = sorted(
            (each for each in candidates if each is not chosen), key=lambda each: each.in_flight / each.weight
        )
        named = [self._destinations.of(each) for each in (chosen, *others[: self._fallbacks])]
        self._proxy.forward(attempt.upstream, ",".join(dict.fromkeys(named)))
        return Call(b"", b"", attempt)

    def backend_is_down(self, backend: Backend) -> None:
        """Leave it to the proxy to send the request elsewhere."""

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error; an answer that has begun is cut off, unless the proxy can go on with it alone."""
        error, answer = as_shed(error), self.delivery.answer
        if error.code == STOPPING and answer is not None and not self._is_read:
            self._proxy.leave()
            self.succeed(answer)
            return
        has_begun = self.delivery.has_begun
        super().end_with_error(error)
        if has_begun:
            self._proxy.abort()

    # The answer

    def needs_answer(self) -> bool:
        """Return whether anything needs the body of the answer."""
        if self.inbound.request_headers.client.tokens_per_minute is not None:
            return True
        if any(observer.needs_answer for observer in self.delivery.observers):
            return True
        is_inference = self.delivery.endpoint is not Endpoint.OTHER
        learns = self.routed is not None and self.routed.model.observe is not None
        return is_inference and self._is_sampled and learns

    def served_by(self, destination: str) -> None:
        """Handle which destination has answered: a fallback if the proxy could not reach the chosen one."""
        first, routed = self.attempt, self.routed
        if first is None or routed is None or destination == self._destinations.of(first.upstream.backend):
            return
        upstream = next(
            (each for each in routed.model.upstreams.values() if self._destinations.of(each.backend) == destination),
            None,
        )
        if upstream is None:  # of no replica of this pool
            return
        first.release()
        self.relay.pool.report_failure(first.upstream.backend)
        self.relay.metrics.retries.labels(*first.upstream.metrics.labels, "proxy").inc()
        self.delivery.retried_from = first.upstream.backend.name
        decision = Decision(upstream.backend.name, "override", "fallback")
        second = self.attempt = Attempt(self, upstream, decision)
        tell(self.delivery.observers, lambda observer: observer.on_send(decision, [upstream.backend]))
        second.take()
        second.call = Call(b"", b"", second)

    def lines_for_client(self) -> bytes:
        """Return the header lines that the answer gets: the id of the request, and which backend was chosen and why."""
        attempt, inbound = self.attempt, self.inbound
        assert attempt is not None
        return (
            request_id_lines(inbound.path, self.delivery.request_id)
            + inbound.request_headers.answer_lines
            + attempt.upstream.lines_of_choice(attempt.decision, self.delivery.retried_from)
        )

    def on_head(self, status: int, headers: HeaderList, *, is_read: bool) -> None:
        """Handle the head of the answer; again if it is found out later that its body is handled."""
        attempt = self.attempt
        if attempt is None or attempt.call is None:
            return
        self._is_read = self._is_read or is_read
        attempt.call.paused = not self._is_read  # its silence is not the backend's
        if self.delivery.answer is None:
            attempt.on_head(status, headers)

    def on_data(self, data: bytes) -> None:
        """Handle bytes of the answer, which the proxy has passed on."""
        if self._is_open() and self.attempt is not None:
            self.attempt.on_data(data)

    def on_end(self) -> None:
        """Handle the end of the answer."""
        if not self._is_open() or self.attempt is None:
            return
        if self._is_read:
            self.attempt.on_end()
        else:
            self.on_close()

    def on_close(self) -> None:
        """Handle that the proxy has nothing more to say: the request has ended, or was cancelled."""
        if not self._is_open():
            self.client_gone()  # while its body waits to be parsed
            return
        answer = self.delivery.answer
        if answer is None or self._is_read:
            self.client_gone()
        else:
            self.succeed(answer)

    def _is_open(self) -> bool:
        return self in self.relay.exchanges


def as_shed(error: GatewayError) -> GatewayError:
    """Return an error as the protocol has it: 429 for requests that are dropped under load, 503 without a replica.

    Examples
    --------
    >>> as_shed(GatewayError(503, "The queue is full.", code="queue_full")).status
    429
    """
    if error.code not in _SHED:
        return error
    return GatewayError(429, error.message, code=error.code, retry_after_s=error.retry_after_s)


_SHED: Final = frozenset({"gateway_full", "queue_full", "queue_timeout"})
