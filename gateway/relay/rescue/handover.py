"""The handover of a stream from one backend to another, and back if that fails."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

from backends.backend import Backend
from backends.http.client import UpstreamError
from gateway.dialects.errors import GatewayError
from gateway.dialects.sse import EventStream, engine_error
from gateway.relay.attempt import Attempt, head_for
from gateway.relay.context import Inbound, RelayContext
from gateway.relay.evidence import OVERLOADED, strike
from gateway.relay.host import Host
from gateway.relay.observers import EndedExchange, Observers
from gateway.relay.rescue.calls import Failure, Rescue, rescue_for
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from policies.features.request import Endpoint

log = logging.getLogger(__name__)

_OUTCOMES: Final = {"ok": "complete", "cancelled": "cancelled"}


class Handover:
    """Takes a stream from one backend to another; the host of the calls for that."""

    def __init__(
        self,
        relay: RelayContext,
        inbound: Inbound,
        request_id: bytes,
        routed: RoutedRequest,
        observers: Observers,
        rescue: Rescue,
    ) -> None:
        self.rescue = rescue  # what the client has, and the calls to the backend that goes on
        # The paused attempt that the stream is being moved away from, which may still go on with it; None without one.
        self.left: Attempt | None = None
        self._relay = relay
        self._inbound = inbound
        self._request_id = request_id
        self._routed = routed
        self._observers = observers
        self._events: EventStream | None = None
        self._exchange: Host | None = None  # once the stream is handed over

    # Called by the exchange

    def watch(self, events: EventStream) -> None:
        """Follow the events of a stream that begins."""
        self._events = events
        self.rescue.watch(events)

    def go_on(self, exchange: Host, message: str, *, is_strike: bool = False, may_return: bool = False) -> bool:
        """Go on with the stream on another backend; return whether it does."""
        if self.left is not None:
            return self.go_back()
        self._exchange, rescue, model = exchange, self.rescue, self._routed.model
        if not (model.rescue and exchange.delivery.has_begun):
            return False
        if not rescue.is_possible:
            return False if may_return else self._is_impossible()
        if rescue.is_generated:
            exchange.cancel_call()
            exchange.reception().on_data(rescue.ending())
            exchange.reception().on_end()
            return True
        attempt = self._attempt()
        name = attempt.upstream.backend.name
        try:
            candidates = exchange.candidates((name, *[failure.backend for failure in rescue.failures]))
        except GatewayError:
            return False if may_return else self._is_impossible()
        tokens = rescue.tokens_so_far
        was_paused = attempt.call is not None and attempt.call.paused
        if may_return and attempt.call is not None:
            attempt.call.pause()
            self.left = attempt
        else:
            attempt.cancel()
        self._begin_attempt(exchange, candidates)
        rescue.begin(self, Failure(name, message, is_strike=is_strike))
        if was_paused:
            exchange.pause()
        to = self._attempt().decision.backend
        fields = {"request_id": self._request_id.decode("latin-1"), "model": model.name, "backend": to}
        text = "a stream of %s goes on at %s, %d tokens long: %s %s"
        log.info(text, model.name, to, tokens, name, message, extra={"fields": fields})
        return True

    def go_back(self) -> bool:
        """Resume at the backend from which the stream was to be moved; return whether there is one."""
        left, exchange = self.left, self._exchange
        if left is None or exchange is None:
            return False
        self.left = None
        attempt = self._attempt()
        is_paused = attempt.call is not None and attempt.call.paused
        attempt.cancel()
        exchange.attempt = left
        self.rescue.give_up()
        if not is_paused:
            exchange.resume()
        return True

    def leave_place(self) -> None:
        """Cancel the attempt that the stream is being moved away from, if there is one."""
        if self.left is not None:
            left, self.left = self.left, None
            left.cancel()

    def pass_error(self, exchange: Host) -> bytes:
        """Go on with a stream that its engine has ended with an error; return that error if no other backend can."""
        attempt = exchange.attempt
        assert attempt is not None
        error = self.rescue.take_error()
        self._relay.pool.report_failure(attempt.upstream.backend)
        is_strike = engine_error(error) != OVERLOADED
        return b"" if self.go_on(exchange, "ended the answer with an error", is_strike=is_strike) else error

    def report_strikes(self) -> None:
        """Report the backends that were at fault, once another one has completed the stream."""
        for failure in self.rescue.failures:
            if failure.is_strike:
                backend = self._routed.model.upstreams[failure.backend].backend
                strike(self._relay.pool, backend, self._inbound, failure.message)

    def note(self, ended: EndedExchange) -> None:
        """Record at the end of an exchange where its stream began, and count what came of it."""
        if not self.rescue.failures:
            return
        first = self.rescue.failures[0].backend
        ended.rescued_from, ended.rescued_at = first, self.rescue.tokens
        if ended.usage is None:
            ended.usage = self.rescue.usage()
        outcome = _OUTCOMES.get(ended.label, "failed")
        self._relay.metrics.rescues.labels(*ended.routed.model.upstreams[first].metrics.labels, outcome).inc()

    # Called by the rescue

    def send_rescue(self, target: bytes, body: bytes, receiver: Rescue) -> None:
        """Send a request to the backend that is to go on."""
        attempt = self._attempt()
        upstream = attempt.upstream
        was_paused = attempt.call is not None and attempt.call.paused
        attempt.last_read_s = time.perf_counter()
        head = head_for(upstream, self._relay, self._inbound, target, body)
        attempt.call = upstream.client.send(head, body, receiver)
        if was_paused:
            attempt.call.pause()

    def on_data(self, data: bytes) -> None:
        """Pass on events."""
        assert self._exchange is not None
        self._exchange.reception().on_data(data)

    def on_end(self) -> None:
        """End the stream."""
        assert self._exchange is not None
        self._exchange.reception().on_end()

    def end_rescue(self) -> None:
        """End the stream, whatever its backend still does."""
        assert self._exchange is not None
        self._exchange.cancel_call()
        self._exchange.reception().on_end()

    def leave(self) -> None:
        """Leave the backend that the stream came from for good."""
        self.leave_place()
        if self._events is not None:
            self._events.rest()  # part of an event, which the client does not get
            self._events.watcher = None

    def on_rescue_error(self, error: UpstreamError) -> None:
        """Try another backend, or end with an error."""
        assert self._exchange is not None
        self._exchange.attempt_failed(error)

    def rescue_is_inexact(self) -> None:
        """Go back to the backend that the stream came from if it can go on, or end with the error that occurred."""
        if self.go_back():
            return
        assert self._exchange is not None
        failure = self.rescue.failures[-1]
        self._exchange.cancel_call()
        self._attempt().upstream = self._routed.model.upstreams[failure.backend]
        self._exchange.fail("broken", failure.message)

    def _attempt(self) -> Attempt:
        assert self._exchange is not None
        assert self._exchange.attempt is not None
        return self._exchange.attempt

    def _begin_attempt(self, exchange: Host, candidates: list[Backend]) -> None:
        relay, routed = self._relay, self._routed
        chosen = relay.router.choose(routed, candidates, self._inbound.request_headers.routing_headers)
        decision = replace(chosen, reason="rescue")
        attempt = Attempt(routed.model.upstreams[decision.backend], decision, relay.pool.recovery)
        exchange.attempt = attempt
        self._observers.on_send(decision, candidates)
        attempt.take()
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()

    def _is_impossible(self) -> bool:
        """Count a stream with which no other backend goes on, unless one has; return False."""
        if not self.rescue.failures:
            count_impossible(self._relay, self._attempt().upstream)
        return False


def handover_for(
    relay: RelayContext,
    inbound: Inbound,
    request_id: bytes,
    endpoint: Endpoint,
    routed: RoutedRequest,
    observers: Observers,
) -> Handover | None:
    """Return what hands over the stream of a request; None if no other backend could go on with it."""
    rescue = rescue_for(endpoint, inbound.target, inbound.body)
    return None if rescue is None else Handover(relay, inbound, request_id, routed, observers, rescue)


def count_impossible(relay: RelayContext, upstream: Upstream) -> None:
    """Count a stream that is lost with its backend."""
    relay.metrics.rescues.labels(*upstream.metrics.labels, "impossible").inc()
