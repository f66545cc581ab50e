"""One call to one backend: the place that it holds among the requests in flight there, and the reception of its answer.

What of the answer can be passed on goes to the client through the `Delivery`; failures go to the exchange, which alone
decides what follows from them.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

from backends.http.client import Call
from backends.http.receiver import AnswerHead, HeaderList, Receiver, UpstreamError, WholeReceiver
from backends.recovery import TRIAL
from gateway.dialects.asked_usage import IDS, USAGE, HiddenUsage
from gateway.dialects.ending import BUSY, InvalidAnswerError
from gateway.dialects.sse import EventStream
from gateway.http.headers import relative_location
from gateway.relay.answers import PassThrough, WholeAnswer
from gateway.routing.model import Upstream
from policies.features.request import Endpoint
from policies.policy import Decision

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

_OTHER: Final = Endpoint.OTHER
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})  # sent with a content length even if the body is empty
_READ_BYTES: Final = 2048  # of an error
_REFUSALS: Final = frozenset({400, 422})
_RETRYABLE: Final = frozenset({BUSY, 500, 502, 503})  # not 504: a server between says that the engine is slow
_FULL: Final = re.compile(rb"busy|overload|queue|capacity|too many|rate.?limit", re.IGNORECASE)
"""How an engine says with 503 that it has too much to do; vLLM: `currently busy and cannot accept new requests`."""
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
OVERLOADED: Final = 503
"""An engine that says so, and is at work, is not at fault, unless most of the others are at hand."""


class Attempt:
    """The part of one backend in an exchange, and the receiver of its answer."""

    def __init__(self, exchange: Exchange, upstream: Upstream, decision: Decision) -> None:
        self.exchange = exchange
        self.delivery = exchange.delivery
        self.upstream = upstream
        self.decision = decision
        # Whether the backend gets the request to show that it can serve again.
        self.is_on_trial = decision.reason == TRIAL
        self.call: Call | None = None  # the call in flight; None before it is sent, and after its end
        self.last_read_s = 0.0  # when it was sent, or something of its answer was last read, by `time.perf_counter`
        # Parameters that the gateway adds to the request of a stream, and those of them that the engine has refused.
        self.added: tuple[bytes, ...] = ()
        self.declined: frozenset[bytes] = frozenset()

    def take(self) -> None:
        """Take a place among the requests in flight at the backend; a call must follow."""
        backend = self.upstream.backend
        backend.in_flight += 1
        backend.sent += 1
        if self.is_on_trial:
            self.exchange.relay.pool.recovery.begin_trial(backend)
        self.last_read_s = time.perf_counter()

    def send(
        self, target: bytes, body: bytes, receiver: Receiver, whole: WholeReceiver | None = None, *, once: bool = False
    ) -> Call:
        """Send a request to the backend."""
        inbound, upstream, relay = self.exchange.inbound, self.upstream, self.exchange.relay
        headers, api_key = inbound.request_headers, upstream.backend.api_key
        if api_key is not None:
            key_lines = b"authorization: Bearer %b\r\n" % api_key.encode()
        else:
            key_lines = headers.key_lines if relay.access.keyring.is_open else b""
        length = b"content-length: %d\r\n" % len(body) if body or headers.method in _WITH_BODY else b""
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bx-request-id: %b\r\n%b\r\n" % (
            headers.method.encode(),
            target,
            upstream.client.address.authority,
            inbound.lines,
            key_lines,
            inbound.engine_id,
            length,
        )
        call = Call(head, body, receiver, head_only=headers.method == "HEAD", whole=whole, once=once)
        upstream.client.send(call)
        if self.delivery.is_paused:
            call.pause()
        return call

    def release(self) -> None:
        """Release the place, at the end of the call."""
        if self.call is not None:
            self.upstream.backend.in_flight -= 1
            if self.is_on_trial:
                self.exchange.relay.pool.recovery.end_trial(self.upstream.backend)
            self.call = None

    def cancel(self) -> None:
        """Cancel the call; nothing more of the answer is read."""
        if self.call is not None:
            self.call.cancel()
            self.release()

    def learn_habits(self, events: EventStream) -> None:
        """Learn what the engine's streams are like, from a complete one of its own."""
        exchange, rescuer = self.exchange, self.exchange.rescuer
        if exchange.routed is None or (rescuer is not None and rescuer.left):
            return
        habits = self.upstream.habits
        if exchange.routed.usage_options is not None and USAGE not in self.added:
            habits.learn(events.last_events())
        if rescuer is not None and IDS in self.added and not rescuer.has_ids:
            habits.declined |= {IDS}  # it takes no notice

    # Called by the upstream client, and by what goes on with a stream elsewhere

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass on an answer that was read in one piece."""
        delivery, upstream, call = self.delivery, self.upstream, self.call
        upstream.backend.read_s = time.perf_counter()
        lines, is_json = upstream.answer_of(head)
        if not is_json or delivery.endpoint is _OTHER:
            headers = [header for header in head.headers if header[0] != b"content-length"]
            self.on_head(head.status, [*headers, (b"content-length", b"%d" % len(body))])
            if self.call is call and body:
                self.on_data(body)
            if self.call is call:
                self.on_end()
            return
        delivery.status = head.status
        routed = self.exchange.routed
        assert routed is not None
        answer = WholeAnswer(delivery.endpoint, routed.items, is_checked=True)
        try:
            answer.take(body)
        except InvalidAnswerError as error:
            self._on_invalid(error)
            return
        delivery.send_whole(answer, lines, body, self)
        self.exchange.succeed(answer)

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Decide by the head how much of the answer is held before it is passed on."""
        self.last_read_s = time.perf_counter()
        if 300 <= status < 400 and not self._redirects_here(headers):
            self.delivery.status = status
            self.exchange.failed("redirect", "redirects to another server, which the gateway does not follow")
            return
        if status == _UNAUTHORIZED and self._refuses_key():
            return
        exchange, routed = self.exchange, self.exchange.routed
        assert routed is not None
        try:
            answer = self.delivery.open(status, headers, routed)
        except InvalidAnswerError as error:
            self._on_invalid(error)
            return
        if (events := answer.events) is None:
            return
        if exchange.rescuer is not None and IDS in self.added:
            exchange.rescuer.watch(events)
        if USAGE in self.added:
            events.hidden = HiddenUsage(self.upstream.habits)
        if self.declined:
            self.upstream.habits.declined |= self.declined

    def on_data(self, data: bytes) -> None:
        """Pass on bytes of the answer, or hold them until the answer is known to be valid."""
        delivery, now_s = self.delivery, time.perf_counter()
        answer = delivery.answer
        assert answer is not None
        previous_s = self.last_read_s
        self.last_read_s = self.upstream.backend.read_s = now_s
        if answer.events is None:
            delivery.times.first_s = now_s
        try:
            data = answer.feed(data)
        except InvalidAnswerError as error:
            self._on_invalid(error)
            return
        if data:
            if not delivery.has_begun:
                self._send_head()
                delivery.times.first_s = now_s
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
            self._on_invalid(error)
            return
        if delivery.status in _RETRYABLE and self._is_retried(delivery.status, rest):
            return
        if answer.events is not None and not answer.events.ending.is_complete:
            # Valid HTTP, which cannot tell: with HTTP/1.0, or a proxy before the engine, every end looks like this.
            flaw = answer.events.ending.flaw or "ended the stream before its last event"
            self._on_invalid(InvalidAnswerError("broken", flaw))
            return
        if delivery.status == _NOT_FOUND and not delivery.has_begun and self._lacks_model(rest):
            return
        refused = [name for name in self.added if name in rest] if delivery.status in _REFUSALS else []
        if refused and not delivery.has_begun:
            self._repeat_without(refused)
            return
        delivery.note_whole(answer)
        if not delivery.has_begun:
            self._send_head()
        delivery.end(rest)
        self.exchange.succeed(answer)

    def _on_given_up(self, answer: PassThrough, events: EventStream, now_s: float) -> None:
        """Handle that the engine gives up a stream; an error that it names itself may be for the client."""
        delivery, exchange, status = self.delivery, self.exchange, events.ending.error_status
        if not status:
            self._on_invalid(InvalidAnswerError("broken", events.ending.flaw))
            return
        if delivery.has_begun:
            message, is_proof = "ended the answer with an error", status not in {OVERLOADED, BUSY}
            if exchange.failed("error", message, is_proof=is_proof, may_fail=False):
                return
        elif status in _RETRYABLE and self._is_retried(status, events.withheld):
            return
        else:
            self._send_head()
            delivery.times.first_s = now_s
        answer.error_status = status
        delivery.send(answer, events.pass_withheld(), now_s)

    def on_error(self, error: UpstreamError) -> None:
        """Handle a failure of the connection."""
        # A server may cut an answer that nobody reads: then the client was too slow.
        is_proof = error.kind in {"broken", "garbage"} and not self.delivery.was_paused
        self.exchange.failed(error.kind, str(error), is_proof=is_proof)

    def _on_invalid(self, error: InvalidAnswerError) -> None:
        """Handle an answer that is not whole, or not what was asked for."""
        is_proof = error.kind == "broken" and not self.delivery.was_paused
        self.exchange.failed(error.kind, str(error), is_proof=is_proof)

    def _is_retried(self, status: int, body: bytes) -> bool:
        """Return whether the request was sent to another backend after an error of the engine."""
        pool, backend = self.exchange.relay.pool, self.upstream.backend
        watch = pool.watch(backend)
        has_work = backend.engine.metrics is None or watch.is_at_work or backend.in_flight > 1
        if status == BUSY or (status == OVERLOADED and has_work and _FULL.search(body, 0, _READ_BYTES)):
            return self.exchange.failed("busy", "", may_fail=False)
        others_up = sum(other is not backend for other in pool.up(backend.model))
        can_spare = 2 * others_up > len(pool.of(backend.model))
        is_evidence = status != OVERLOADED or not watch.is_at_work or can_spare
        message = f"answered {status} to a request that another served" if is_evidence else ""
        return self.exchange.failed("status", message, may_fail=False)

    def _refuses_key(self) -> bool:
        """Return whether that was dealt with; if the engine has refused the client's own key, the client may see it."""
        access, headers = self.exchange.relay.access, self.exchange.inbound.request_headers
        is_of_client = self.upstream.backend.api_key is None and access.keyring.is_open and headers.key_lines != b""
        message = "" if is_of_client else "refuses the key that the gateway sends it"
        return self.exchange.failed("key", message, may_fail=not is_of_client)

    def _lacks_model(self, body: bytes) -> bool:
        """Return whether that was dealt with; an alias or adapter that no engine serves is for the client to see."""
        routed = self.exchange.routed
        if routed is None or self.delivery.endpoint is _OTHER or b"model" not in body.lower():
            return False
        is_own = routed.model.name.encode() in body
        message = "does not serve its model any more" if is_own else ""
        return self.exchange.failed("model", message, may_fail=is_own)

    def _repeat_without(self, refused: list[bytes]) -> None:
        """Send the request to the same backend once more, without parameters that the gateway has added."""
        self.cancel()
        self.delivery.answer = None
        self.declined = self.declined.union(refused)
        self.take()
        self.call = self.exchange.call(self, [])

    def _send_head(self) -> None:
        if (self.is_on_trial or self.delivery.retried_from) and self.delivery.is_served():
            # The rest of a long answer is no further evidence.
            self.exchange.note_served(self.upstream.backend if self.is_on_trial else None)
        self.delivery.send_head(self)

    def _redirects_here(self, headers: HeaderList) -> bool:
        authority = self.upstream.client.address.authority
        locations = [value for name, value in headers if name == b"location"]
        return all(relative_location(location, authority) is not None for location in locations)
