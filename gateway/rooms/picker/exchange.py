"""One request of which a proxy carries the bytes: the gateway chooses its backend, and sees the answer go by."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, Protocol

from backends.backend import Backend
from backends.http.client import Call
from backends.http.receiver import HeaderList
from gateway.dialects.errors import GatewayError
from gateway.http.headers import request_id_lines
from gateway.relay.attempt import Attempt
from gateway.relay.context import STOPPING
from gateway.relay.exchange import Exchange
from gateway.relay.roles import Sender
from gateway.rooms.picker.destinations import Destinations
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import Router
from policies.features.request import Endpoint
from policies.policy import Decision

_SHED: Final = frozenset({"gateway_full", "queue_full", "queue_timeout"})


class Proxy(Protocol):
    """The proxy's side of an exchange; of the answer it gets errors only."""

    def forward(self, upstream: Upstream, destinations: str, body: bytes, lines: bytes, engine_id: bytes) -> None:
        """Send the request to the first of some destinations, which is a backend's, or to the next if it fails."""

    def leave(self) -> None:
        """Leave the rest of the answer to the proxy."""

    def abort(self) -> None:
        """Tell the proxy to cut off the answer."""


class ProxySender(Sender):
    """The way of a request that a proxy sends, which may send it elsewhere than it was told."""

    is_relayed: ClassVar[bool] = False

    def __init__(
        self, proxy: Proxy, destinations: Destinations, subset: Collection[str] | None, fallbacks: int
    ) -> None:
        self._proxy = proxy
        self._destinations = destinations
        self._subset = subset  # the destinations that the proxy allows; None for all
        self._fallbacks = fallbacks
        self.is_read = False  # whether the proxy shows the answer

    def read(self, *, is_read: bool) -> None:
        """Note whether the proxy shows the answer."""
        self.is_read = self.is_read or is_read

    def candidates(
        self, router: Router, routed: RoutedRequest, tried: tuple[str, ...], *, may_try: bool
    ) -> list[Backend]:
        """Return the candidates whose destination is known and allowed."""
        for tries in (True, False) if may_try else (False,):  # the one on trial, which comes alone, may not be allowed
            found = router.candidates(routed, tried, may_try=tries)
            if allowed := [backend for backend in found if self._is_allowed(backend)]:
                return allowed
        of = "that the proxy allows is up" if self._subset is not None else "has a known address"
        raise GatewayError(503, f"No endpoint {of}. Try again shortly.", code="no_backend", retry_after_s=2.0)

    def _is_allowed(self, backend: Backend) -> bool:
        destination = self._destinations.of(backend)
        return destination != "" and (self._subset is None or destination in self._subset)

    def send(
        self, call: Call, upstream: Upstream, candidates: Sequence[Backend], lines: bytes, engine_id: bytes
    ) -> None:
        """Tell the proxy to send the request to a backend, or else to another candidate."""
        chosen = upstream.backend
        others = sorted(
            (each for each in candidates if each is not chosen), key=lambda each: each.in_flight / each.weight
        )
        named = [self._destinations.of(each) for each in (chosen, *others[: self._fallbacks])]
        self._proxy.forward(upstream, ",".join(dict.fromkeys(named)), call.body, lines, engine_id)

    def shown(self, error: GatewayError) -> GatewayError:
        """Return an error as the protocol has it: 429 for what is dropped under load, 503 without a replica."""
        if error.code not in _SHED:
            return error
        return GatewayError(429, error.message, code=error.code, retry_after_s=error.retry_after_s)

    def goes_on(self, error: GatewayError) -> bool:
        """Leave an answer that is not read to the proxy, if this process stops."""
        if error.code != STOPPING or self.is_read:
            return False
        self._proxy.leave()
        return True

    def cut_off(self) -> None:
        """Tell the proxy to cut off the answer."""
        self._proxy.abort()


class Picked:
    """What a proxy says of an exchange whose request it sends, and whose answer it passes on.

    Admission, choice and accounting are those of the relay. Retries are the proxy's: it has been told where else the
    request may go.
    """

    def __init__(self, exchange: Exchange, sender: ProxySender, destinations: Destinations, answers: float) -> None:
        self._exchange = exchange
        self._sender = sender
        self._destinations = destinations
        self._is_sampled = random.random() < answers  # whether a policy that learns is to see the answer

    @property
    def is_sent(self) -> bool:
        """Whether a backend has been chosen."""
        return self._exchange.attempt is not None

    def needs_answer(self) -> bool:
        """Return whether anything needs the body of the answer."""
        exchange = self._exchange
        if exchange.request.client.tokens_per_minute is not None:
            return True
        if any(observer.needs_answer for observer in exchange.delivery.observers):
            return True
        is_inference = exchange.delivery.endpoint is not Endpoint.OTHER
        return is_inference and self._is_sampled and exchange.routed.model.observe is not None

    def served_by(self, destination: str) -> None:
        """Handle which destination has answered: a fallback if the proxy could not reach the chosen one."""
        first = self._exchange.attempt
        if first is None or destination == self._destinations.of(first.upstream.backend):
            return
        for upstream in self._exchange.routed.model.upstreams.values():
            if self._destinations.of(upstream.backend) == destination:  # else of no replica of this pool
                self._exchange.served_by(upstream, Decision(upstream.backend.name, "override", "fallback"))
                return

    def lines_for_client(self) -> bytes:
        """Return the header lines that the answer gets: the id of the request, and which backend was chosen and why."""
        request, attempt, delivery = self._exchange.request, self._exchange.attempt, self._exchange.delivery
        choice_lines = b""
        if attempt is not None:
            choice_lines = attempt.upstream.lines_of_choice(attempt.decision, delivery.retried_from)
        return request_id_lines(request.path, delivery.request_id) + request.answer_lines + choice_lines

    def on_head(self, status: int, headers: HeaderList, *, is_read: bool) -> None:
        """Handle the head of the answer; again if it is found out later that its body is handled."""
        attempt = self._exchange.attempt
        if attempt is None or attempt.call is None:
            return
        self._sender.read(is_read=is_read)
        if self._sender.is_read:
            attempt.call.resume()
        else:
            attempt.call.pause()  # its silence is not the backend's
        if self._exchange.delivery.answer is None:
            attempt.on_head(status, headers)

    def on_data(self, data: bytes) -> None:
        """Handle bytes of the answer, which the proxy has passed on."""
        if (attempt := self._open()) is not None:
            attempt.on_data(data)

    def on_end(self) -> None:
        """Handle the end of the answer."""
        if (attempt := self._open()) is None:
            return
        if self._sender.is_read:
            attempt.on_end()
        else:
            self.client_gone()

    def pause(self) -> None:
        """Do nothing: the proxy passes the answer on."""

    def resume(self) -> None:
        """Do nothing."""

    def client_gone(self) -> None:
        """Handle that the proxy has nothing more to say: the request has ended, or was cancelled."""
        answer, attempt = self._exchange.delivery.answer, self._open()
        if attempt is None or answer is None or self._sender.is_read:
            self._exchange.client_gone()
        else:
            self._exchange.succeed(attempt, answer)

    def _open(self) -> Attempt | None:
        return self._exchange.attempt if self._exchange.is_open else None
