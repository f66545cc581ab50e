"""One call to one backend: its place among the requests in flight there, and the reception of its answer.

The answer goes to the client through the `Delivery`; failures go to the exchange, which alone decides what follows.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from backends.backend import Backend
from backends.http.client import Call
from backends.http.receiver import AnswerHead, HeaderList, Receiver, UpstreamError, WholeReceiver
from backends.recovery import TRIAL
from gateway.dialects.asked_usage import IDS, USAGE
from gateway.dialects.draft_depth import with_draft_tokens
from gateway.dialects.ending import BUSY, InvalidAnswerError
from gateway.dialects.errors import GatewayError
from gateway.dialects.sse import EventStream
from gateway.relay.answers import PassThrough, WholeAnswer
from gateway.relay.context import RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.engine_errors import (
    OVERLOADED,
    REFUSALS,
    RETRYABLE,
    TOLD_IN_BODY,
    UNAUTHORIZED,
    failure_of,
    redirects_elsewhere,
)
from gateway.relay.failures import Failure, Step, backend_failed
from gateway.relay.observers import Traced
from gateway.relay.outgoing import DEEP, Added, body_of, head_of
from gateway.relay.roles import Rescuer, Sender, Silence
from gateway.routing.access import RequestHeaders
from gateway.routing.contexts import longer, none_takes_it, refusal_of
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import Endpoint
from policies.policy import Decision

_now_s: Final = time.perf_counter
_OTHER: Final = Endpoint.OTHER
_NOTHING: Final = frozenset[bytes]()


class Tried(ABC):
    """The exchange as its attempts see it: the request, and the effects of what they receive."""

    relay: RelayContext
    request: RequestHeaders
    body: bytes
    routed: RoutedRequest
    rescuer: Rescuer | None
    sender: Sender
    engine_id: bytes  # the id of the request for engines
    traced: Traced | None  # traces the request; None if it is not traced

    @abstractmethod
    def choose(self, candidates: list[Backend], reason: str = "") -> Attempt:
        """Begin an attempt at one of the candidates; `reason` replaces that of the policy."""

    @abstractmethod
    def failed(self, attempt: Attempt, failure: Failure) -> Step:
        """Handle a failure and return the step taken: see `gateway.relay.failover`."""

    @abstractmethod
    def succeed(self, attempt: Attempt, answer: PassThrough) -> None:
        """End with an answer that was passed on."""

    @abstractmethod
    def end_with_error(self, error: GatewayError) -> None:
        """End with an error."""

    @abstractmethod
    def note_served(self) -> None:
        """Report the backends that failed the request, since another one serves it."""


class Attempt(WholeReceiver):
    """One backend's part in an exchange; it receives its answer."""

    def __init__(
        self, exchange: Tried, delivery: Delivery, upstream: Upstream, decision: Decision, *, is_sent: bool = False
    ) -> None:
        self.exchange = exchange
        self.delivery = delivery
        self.request_id = delivery.request_id
        self.upstream = upstream
        self.decision = decision
        # Whether the request tests if the backend can serve again.
        self.is_on_trial = decision.reason == TRIAL
        # The call in flight; None before it is sent, and after its end. `is_sent`: a proxy has sent it already.
        self.call: Call | None = Call(b"", b"", self) if is_sent else None
        self.last_read_s = 0.0  # when it was sent or its answer last read, by `time.perf_counter`
        self.added: Added = ()
        self._declined = _NOTHING  # those that the engine has rejected
        self._has_place = False
        self._take()

    def _take(self) -> None:
        """Take a place among the requests in flight at the backend."""
        self._has_place = True
        self.upstream.backend.take()
        if self.is_on_trial:
            self.exchange.relay.pool.recovery.begin_trial(self.upstream.backend)
        self.last_read_s = _now_s()

    def send(self, candidates: Sequence[Backend]) -> None:
        """Send the request to the backend, with the gateway's additions."""
        exchange, routed = self.exchange, self.exchange.routed
        rescuer, body = exchange.rescuer, exchange.body
        options = routed.usage_options if exchange.sender.is_relayed else None  # a proxy forwards the usage
        if rescuer is not None or options is not None:
            body, self.added = body_of(body, options, rescuer, self.upstream.habits, self._declined)
        depth = exchange.relay.router.depth(routed.model.name, self.decision.backend)
        if depth is not None and self.delivery.endpoint in DEEP:
            body = with_draft_tokens(body, depth)
        self.ask(exchange.request.target, body, self, candidates)

    def resume(self) -> None:
        """Resume reading the answer; the pause does not count as silence of the backend."""
        if self.call is not None:
            self.last_read_s = _now_s()
            self.call.resume()

    def release(self) -> None:
        """Release the place, at the end of the call or if it could not be made."""
        self.call = None
        if self._has_place:
            self._has_place = False
            self.upstream.backend.release()
            if self.is_on_trial:
                self.exchange.relay.pool.recovery.end_trial(self.upstream.backend)

    def cancel(self) -> None:
        """Cancel the call; nothing more of the answer is read."""
        if self.call is not None:
            self.call.cancel()
        self.release()

    def complete(self) -> None:
        """End a stream whose last event was passed on."""
        self.cancel()
        answer = self.delivery.complete_stream()
        self.delivery.end()
        if answer is not None:
            self.exchange.succeed(self, answer)

    def silence_of(self, backend: Backend, now_s: float) -> Silence | None:
        """Return how long a backend has been silent on this request; None if it is not expected to answer."""
        if self.call is None or self.call.paused or self.upstream.backend is not backend:
            return None
        if self.delivery.endpoint is _OTHER:
            return None
        prompt_tokens = 0 if self.delivery.first_s else self.exchange.routed.features.prompt_tokens
        return Silence(now_s - self.last_read_s, prompt_tokens)

    # Called by the rescuer

    def leave_for(self, candidates: list[Backend]) -> Attempt:
        """Cancel the call, and return an attempt at one of the candidates; its `ask` must follow."""
        self.cancel()
        return self.exchange.choose(candidates, "rescue")

    def ask(self, target: bytes, body: bytes, receiver: Receiver, candidates: Sequence[Backend] = ()) -> None:
        """Send a request to the backend, chosen among the candidates; its answer goes to a receiver."""
        exchange, request = self.exchange, self.exchange.request
        if receiver is not self:
            self.last_read_s = _now_s()
        lines = request.lines if exchange.traced is None else exchange.traced.lines
        head = b""
        if exchange.sender.is_relayed:
            keys = request.key_lines if exchange.relay.access.keyring.is_open else b""
            head = head_of(request.method, target, self.upstream, body, lines, exchange.engine_id, keys)
        is_head, once = request.method == "HEAD", not request.may_repeat
        call = self.call = Call(
            head, body, receiver, head_only=is_head, whole=self if receiver is self else None, once=once
        )
        exchange.sender.send(call, self.upstream, candidates, lines, exchange.engine_id)
        if self.delivery.is_paused:
            call.pause()

    def give_up(self, upstream: Upstream, message: str) -> None:
        """End the stream with the error of a backend that failed before."""
        self.cancel()
        self.upstream = upstream
        name = upstream.backend.name
        self.exchange.end_with_error(backend_failed(name, "broken", message, has_begun=True, may_repeat=True))

    # Called by the upstream client and the rescuer

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass on an answer that was read in one piece."""
        delivery, upstream, call = self.delivery, self.upstream, self.call
        upstream.backend.note_read(_now_s())
        lines, is_json = upstream.answer_of(head)
        if not is_json or delivery.endpoint is _OTHER:
            headers = [header for header in head.headers if header[0] != b"content-length"]
            self.on_head(head.status, [*headers, (b"content-length", b"%d" % len(body))])
            if self.call is call and body:
                self.on_data(body)
            if self.call is call:
                self.on_end()
            return
        answer = WholeAnswer(delivery.endpoint, self.exchange.routed.items, is_checked=True)
        try:
            answer.take(body)
        except InvalidAnswerError as error:
            self.on_error(error)
            return
        delivery.send_whole(answer, head.status, lines, body, upstream, self.decision)
        self.exchange.succeed(self, answer)

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Decide by the head how much of the answer is held before it is passed on."""
        self.last_read_s = _now_s()
        if redirects_elsewhere(status, headers, self.upstream.client.address.authority):
            message = "redirects to another server, which the gateway does not follow"
            self.exchange.failed(self, Failure("redirect", message))
            return
        if status == UNAUTHORIZED and self._is_dealt_with(status, b""):
            return
        exchange = self.exchange
        try:
            answer = self.delivery.open(status, headers, exchange.routed)
        except InvalidAnswerError as error:
            self.on_error(error)
            return
        if (events := answer.events) is None:
            if any(name == b"content-encoding" for name, _ in headers):  # never asked for, and not read
                exchange.relay.metrics.note_implausible(self.upstream.backend, "content-encoding")
            return
        if exchange.rescuer is not None and IDS in self.added:
            exchange.rescuer.watch(events)
        if USAGE in self.added:
            events.hide_usage(self.upstream.habits)
        if self._declined:
            self.upstream.habits.decline(*self._declined)

    def on_data(self, data: bytes) -> None:
        """Pass on bytes of the answer, or hold them until the answer is known to be valid."""
        delivery, now_s = self.delivery, _now_s()
        answer = delivery.answer
        assert answer is not None
        previous_s, self.last_read_s = self.last_read_s, now_s
        self.upstream.backend.note_read(now_s)
        if not delivery.first_s and answer.events is None:
            delivery.note_first(now_s)
        try:
            data = answer.feed(data)
        except InvalidAnswerError as error:
            self.on_error(error)
            return
        if data:
            if not delivery.has_begun:
                self._send_head()
                delivery.note_first(now_s)
            elif answer.events is not None:
                self.upstream.metrics.itl.observe(now_s - previous_s)
            delivery.send(answer, data, now_s)
        if answer.events is not None and answer.events.withheld:
            self._on_given_up(answer, answer.events, now_s)

    def on_end(self) -> None:
        """Pass on the end of the answer, and finish the exchange."""
        delivery = self.delivery
        answer = delivery.answer
        assert answer is not None
        try:
            rest = answer.end()
        except InvalidAnswerError as error:
            self.on_error(error)
            return
        if delivery.status in TOLD_IN_BODY and self._is_dealt_with(delivery.status, rest):
            return
        if answer.events is not None and not answer.events.ending.is_complete:
            # The HTTP is valid, but proves nothing: with HTTP/1.0, or behind a proxy, every end looks like this.
            flaw = answer.events.ending.flaw or "ended the stream before its last event"
            self.on_error(InvalidAnswerError("broken", flaw))
            return
        delivery.note_whole(answer)
        if not delivery.has_begun:
            self._send_head()
        delivery.end(rest)
        self.exchange.succeed(self, answer)

    def _on_given_up(self, answer: PassThrough, events: EventStream, now_s: float) -> None:
        """Handle a stream that the engine gives up; an error among its events may be for the client."""
        delivery, status = self.delivery, events.ending.error_status
        if not status:
            self.on_error(InvalidAnswerError("broken", events.ending.flaw))
            return
        if delivery.has_begun:
            failure = Failure("error", "ended the answer with an error", is_proof=status not in {OVERLOADED, BUSY})
            if self.exchange.failed(self, failure) is not Step.ENGINE_ERROR:
                return
        elif status in RETRYABLE and self._is_dealt_with(status, events.withheld):
            return
        else:
            self._send_head()
            delivery.note_first(now_s)
        answer.note_error(status)
        delivery.send(answer, events.pass_withheld(), now_s)

    def on_error(self, error: UpstreamError | InvalidAnswerError) -> None:
        """Handle a failed connection, or an answer that is incomplete or invalid."""
        is_cut = error.kind == "broken" or (error.kind == "garbage" and isinstance(error, UpstreamError))
        # A server may cut an answer that nobody reads: that is the fault of a slow client.
        self.exchange.failed(self, Failure(error.kind, str(error), is_proof=is_cut and not self.delivery.was_paused))

    def _is_dealt_with(self, status: int, body: bytes) -> bool:
        """Handle an error of the engine if possible; return whether, in which case the client does not get it.

        A rejected addition of the gateway is left out; a request that is too long goes elsewhere. If no backend takes
        it and all contexts are alike, the engine's own error says enough.
        """
        exchange, backend, pool = self.exchange, self.upstream.backend, self.exchange.relay.pool
        if self.delivery.has_begun and status not in RETRYABLE:
            return False
        if status in REFUSALS and (refused := [name for name in self.added if name in body]):
            self._repeat_without(refused)
            return True
        is_open, key_lines = exchange.relay.access.keyring.is_open, exchange.request.key_lines
        knows_key = backend.api_key is None and is_open and key_lines != b""
        failure = failure_of(status, body, backend, pool, self.delivery.endpoint, knows_key=knows_key)
        if failure is None:
            return False
        if exchange.failed(self, failure) is not Step.ENGINE_ERROR:
            return True
        if failure.kind != "length" or backend.model not in pool.unlike.contexts or not exchange.sender.is_relayed:
            return False
        try:
            others = longer(exchange.relay.router.members(exchange.routed), backend)
        except GatewayError:  # a reload has removed them
            others = []
        exchange.end_with_error(none_takes_it(refusal_of(body)[1], pool.of(backend.model), others))
        return True

    def _repeat_without(self, refused: list[bytes]) -> None:
        """Resend the request to the same backend, without parameters that the gateway had added."""
        self.cancel()
        self.delivery.restart()
        self._declined = self._declined.union(refused)
        self._take()
        self.send([])

    def _send_head(self) -> None:
        if (self.is_on_trial or self.delivery.retried_from) and self.delivery.is_served():
            # The rest of a long answer is no further evidence.
            if self.is_on_trial:
                self.exchange.relay.pool.report_success(self.upstream.backend)
            self.exchange.note_served()
        self.delivery.send_head(self.upstream, self.decision)
