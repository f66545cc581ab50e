"""One call to one backend: the place that it holds among the requests in flight there, and the reception of its answer.

What of the answer can be passed on goes to the client through the `Delivery`; failures go to the exchange, which alone
decides what follows from them.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Final, Protocol

from backends.backend import Backend
from backends.http.client import Call
from backends.http.receiver import AnswerHead, HeaderList, Receiver, UpstreamError
from backends.recovery import TRIAL
from gateway.dialects.asked_usage import IDS, USAGE, asking
from gateway.dialects.draft_depth import with_draft_tokens
from gateway.dialects.ending import BUSY, InvalidAnswerError
from gateway.dialects.errors import GatewayError
from gateway.dialects.sse import EventStream
from gateway.http.headers import relative_location
from gateway.relay.answers import PassThrough, WholeAnswer
from gateway.relay.context import RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.failures import Step, backend_failed
from gateway.relay.roles import Rescuer, Sender
from gateway.routing.access import RequestHeaders
from gateway.routing.contexts import none_takes_it, refusal_of
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from policies.features.request import Endpoint
from policies.policy import Decision

_OTHER: Final = Endpoint.OTHER
DEEP: Final = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
"""Endpoints whose requests can say how deep their engine drafts."""
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})  # sent with a content length even if the body is empty
_READ_BYTES: Final = 2048  # of an error
_REFUSALS: Final = frozenset({400, 422})
_RETRYABLE: Final = frozenset({BUSY, 500, 502, 503})  # not 504: a server between says that the engine is slow
_FULL: Final = re.compile(rb"busy|overload|queue|capacity|too many|rate.?limit", re.IGNORECASE)
"""How an engine says with 503 that it has too much to do; vLLM: `currently busy and cannot accept new requests`."""
_NOTHING: Final = frozenset[bytes]()
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
OVERLOADED: Final = 503
"""An engine that says so, and is at work, is not at fault, unless most of the others are at hand."""


class Tried(Protocol):
    """The exchange, as its attempts know it: the request, and what follows from what they get."""

    relay: RelayContext
    request: RequestHeaders
    body: bytes
    routed: RoutedRequest
    rescuer: Rescuer | None
    sender: Sender
    engine_id: bytes  # the id of the request for engines

    @property
    def lines(self) -> bytes:
        """Header lines for the next backend."""

    def choose(self, candidates: list[Backend], reason: str = "") -> Attempt:
        """Begin an attempt at one of the candidates; `reason` replaces that of the policy."""

    def failed(
        self, attempt: Attempt, kind: str, message: str, *, is_proof: bool = False, otherwise: Step | None = None
    ) -> Step:
        """Do what follows from a failure, and return it; `otherwise` is done by the caller in place of failing."""

    def succeed(self, attempt: Attempt, answer: PassThrough) -> None:
        """End with an answer that was passed on."""

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error."""

    def note_served(self, backend: Backend | None) -> None:
        """Report that the request is being served, by a backend if that is evidence for it."""


class Attempt:
    """The part of one backend in an exchange, and the receiver of its answer."""

    def __init__(self, exchange: Tried, delivery: Delivery, upstream: Upstream, decision: Decision) -> None:
        self.exchange = exchange
        self.delivery = delivery
        self.upstream = upstream
        self.decision = decision
        # Whether the backend gets the request to show that it can serve again.
        self.is_on_trial = decision.reason == TRIAL
        self.call: Call | None = None  # the call in flight; None before it is sent, and after its end
        self.last_read_s = 0.0  # when it was sent, or something of its answer was last read, by `time.perf_counter`
        # Parameters that the gateway adds to the request of a stream, and those of them that the engine has refused.
        self._added: tuple[bytes, ...] = ()
        self._declined = _NOTHING
        self._take()

    def _take(self) -> None:
        """Take a place among the requests in flight at the backend; a call must follow."""
        self.upstream.backend.take()
        if self.is_on_trial:
            self.exchange.relay.pool.recovery.begin_trial(self.upstream.backend)
        self.last_read_s = time.perf_counter()

    def send(self, candidates: list[Backend]) -> None:
        """Send the request to the backend, which was chosen among the candidates."""
        exchange = self.exchange
        rescuer, body, options = exchange.rescuer, exchange.body, exchange.routed.usage_options
        if rescuer is not None or options is not None:
            habits, self._added = self.upstream.habits, ()
            declined = habits.declined | self._declined
            with_ids = None if rescuer is None or IDS in declined else rescuer.body
            if with_ids is not None:
                body, self._added = with_ids, (IDS,)
            if options is not None and habits.may_ask and USAGE not in declined:
                body, self._added = asking(body, options), (*self._added, USAGE)
        depth = exchange.relay.router.depth(exchange.routed.model.name, self.decision.backend)
        if depth is not None and self.delivery.endpoint in DEEP:
            body = with_draft_tokens(body, depth)
        request, lines = exchange.request, exchange.lines
        is_head, once = request.method == "HEAD", not request.may_repeat
        head = self._head(request.target, body, lines) if exchange.sender.is_relayed else b""
        call = self.call = Call(head, body, self, head_only=is_head, whole=self, once=once)
        exchange.sender.send(call, self.upstream, candidates, lines, exchange.engine_id)
        if self.delivery.is_paused:
            call.pause()

    def _head(self, target: bytes, body: bytes, lines: bytes) -> bytes:
        exchange, upstream = self.exchange, self.upstream
        request, api_key = exchange.request, upstream.backend.api_key
        if api_key is not None:
            key_lines = b"authorization: Bearer %b\r\n" % api_key.encode()
        else:
            key_lines = request.key_lines if exchange.relay.access.keyring.is_open else b""
        length = b"content-length: %d\r\n" % len(body) if body or request.method in _WITH_BODY else b""
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bx-request-id: %b\r\n%b\r\n" % (
            request.method.encode(),
            target,
            upstream.client.address.authority,
            lines,
            key_lines,
            exchange.engine_id,
            length,
        )

    def is_sent(self) -> None:
        """Note that a proxy has sent the request."""
        self.call = Call(b"", b"", self)

    def lines_of_choice(self) -> bytes:
        """Return the header lines of an answer that say which backend was chosen, and why."""
        return self.upstream.lines_of_choice(self.decision, self.delivery.retried_from)

    def pause(self) -> None:
        """Pause reading the answer."""
        if self.call is not None:
            self.call.pause()

    def resume(self) -> None:
        """Resume reading the answer; the pause does not count as silence of the backend."""
        if self.call is not None:
            self.last_read_s = time.perf_counter()
            self.call.resume()

    def release(self) -> None:
        """Release the place, at the end of the call."""
        if self.call is not None:
            self.upstream.backend.release()
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
        rescuer, habits = self.exchange.rescuer, self.upstream.habits
        if rescuer is not None and rescuer.left:
            return
        if self.exchange.routed.usage_options is not None and USAGE not in self._added:
            habits.learn(events.last_events())
        if rescuer is not None and IDS in self._added and not rescuer.has_ids:
            habits.decline(IDS)  # it takes no notice

    # Called by what goes on with a stream elsewhere

    @property
    def request_id(self) -> bytes:
        """The id of the request."""
        return self.delivery.request_id

    def leave_for(self, candidates: list[Backend]) -> Attempt:
        """Cancel the call, and return an attempt at one of the candidates; its `ask` must follow."""
        self.cancel()
        return self.exchange.choose(candidates, "rescue")

    def ask(self, target: bytes, body: bytes, receiver: Receiver) -> None:
        """Send a request to the backend, whose answer goes to a receiver."""
        self.last_read_s = time.perf_counter()
        self.call = Call(self._head(target, body, self.exchange.lines), body, receiver)
        self.upstream.client.send(self.call)
        if self.delivery.is_paused:
            self.call.pause()

    def end_with(self, events: bytes) -> None:
        """Cancel the call, and end the stream with some last events."""
        self.cancel()
        self.on_data(events)
        self.on_end()

    def give_up(self, upstream: Upstream, message: str) -> None:
        """End the stream with the error of a backend that failed before."""
        self.cancel()
        self.upstream = upstream
        name = upstream.backend.name
        self.exchange.end_with_error(backend_failed(name, "broken", message, has_begun=True, may_repeat=True))

    # Called by the upstream client, and by what goes on with a stream elsewhere

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass on an answer that was read in one piece."""
        delivery, upstream, call = self.delivery, self.upstream, self.call
        upstream.backend.note_read(time.perf_counter())
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
            self._on_invalid(error)
            return
        delivery.send_whole(answer, head.status, lines, body, upstream, self.decision)
        self.exchange.succeed(self, answer)

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Decide by the head how much of the answer is held before it is passed on."""
        self.last_read_s = time.perf_counter()
        if 300 <= status < 400 and not self._redirects_here(headers):
            self._fail("redirect", "redirects to another server, which the gateway does not follow")
            return
        if status == _UNAUTHORIZED and self._refuses_key():
            return
        exchange = self.exchange
        try:
            answer = self.delivery.open(status, headers, exchange.routed)
        except InvalidAnswerError as error:
            self._on_invalid(error)
            return
        if (events := answer.events) is None:
            return
        if exchange.rescuer is not None and IDS in self._added:
            exchange.rescuer.watch(events)
        if USAGE in self._added:
            events.hide_usage(self.upstream.habits)
        if self._declined:
            self.upstream.habits.decline(*self._declined)

    def on_data(self, data: bytes) -> None:
        """Pass on bytes of the answer, or hold them until the answer is known to be valid."""
        delivery, now_s = self.delivery, time.perf_counter()
        answer = delivery.answer
        assert answer is not None
        previous_s, self.last_read_s = self.last_read_s, now_s
        self.upstream.backend.note_read(now_s)
        if answer.events is None:
            delivery.note_first(now_s)
        try:
            data = answer.feed(data)
        except InvalidAnswerError as error:
            self._on_invalid(error)
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
        if delivery.status in _REFUSALS and not delivery.has_begun and self._is_refused(rest):
            return
        delivery.note_whole(answer)
        if not delivery.has_begun:
            self._send_head()
        delivery.end(rest)
        self.exchange.succeed(self, answer)

    def _on_given_up(self, answer: PassThrough, events: EventStream, now_s: float) -> None:
        """Handle that the engine gives up a stream; an error that it names itself may be for the client."""
        delivery, status = self.delivery, events.ending.error_status
        if not status:
            self._on_invalid(InvalidAnswerError("broken", events.ending.flaw))
            return
        if delivery.has_begun:
            message, is_proof = "ended the answer with an error", status not in {OVERLOADED, BUSY}
            if self._fail("error", message, is_proof=is_proof) is not Step.ENGINE_ERROR:
                return
        elif status in _RETRYABLE and self._is_retried(status, events.withheld):
            return
        else:
            self._send_head()
            delivery.note_first(now_s)
        answer.note_error(status)
        delivery.send(answer, events.pass_withheld(), now_s)

    def on_error(self, error: UpstreamError) -> None:
        """Handle a failure of the connection."""
        # A server may cut an answer that nobody reads: then the client was too slow.
        is_proof = error.kind in {"broken", "garbage"} and not self.delivery.was_paused
        self._fail(error.kind, str(error), is_proof=is_proof)

    def _on_invalid(self, error: InvalidAnswerError) -> None:
        """Handle an answer that is not whole, or not what was asked for."""
        is_proof = error.kind == "broken" and not self.delivery.was_paused
        self._fail(error.kind, str(error), is_proof=is_proof)

    def _is_retried(self, status: int, body: bytes) -> bool:
        """Return whether the request was sent to another backend after an error of the engine."""
        pool, backend = self.exchange.relay.pool, self.upstream.backend
        watch = pool.watch(backend)
        has_work = backend.engine.metrics is None or watch.is_at_work or backend.in_flight > 1
        if status == BUSY or (status == OVERLOADED and has_work and _FULL.search(body, 0, _READ_BYTES)):
            return self._fail("busy", "") is not Step.ENGINE_ERROR
        others_up = sum(other is not backend for other in pool.up(backend.model))
        can_spare = 2 * others_up > len(pool.of(backend.model))
        is_evidence = status != OVERLOADED or not watch.is_at_work or can_spare
        message = f"answered {status} to a request that another served" if is_evidence else ""
        return self._fail("status", message) is not Step.ENGINE_ERROR

    def _refuses_key(self) -> bool:
        """Return whether that was dealt with; if the engine has refused the client's own key, the client may see it."""
        access, request = self.exchange.relay.access, self.exchange.request
        is_of_client = self.upstream.backend.api_key is None and access.keyring.is_open and request.key_lines != b""
        message = "" if is_of_client else "refuses the key that the gateway sends it"
        otherwise = Step.ENGINE_ERROR if is_of_client else None
        return self._fail("key", message, otherwise=otherwise) is not Step.ENGINE_ERROR

    def _lacks_model(self, body: bytes) -> bool:
        """Return whether that was dealt with; an alias or adapter that no engine serves is for the client to see."""
        if self.delivery.endpoint is _OTHER or b"model" not in body.lower():
            return False
        is_own = self.exchange.routed.model.name.encode() in body
        message = "does not serve its model any more" if is_own else ""
        otherwise = None if is_own else Step.ENGINE_ERROR
        return self._fail("model", message, otherwise=otherwise) is not Step.ENGINE_ERROR

    def _is_refused(self, body: bytes) -> bool:
        """Return whether that was dealt with: what the gateway has added is left out, what is too long goes elsewhere.

        Where none takes it and all contexts are alike, the engine's own error says enough.
        """
        if added := [name for name in self._added if name in body]:
            self._repeat_without(added)
            return True
        exchange, backend = self.exchange, self.upstream.backend
        tokens, message = refusal_of(body)
        if not tokens:
            return False
        pool, said = exchange.relay.pool, backend.engine.said
        if not said.context_tokens:
            backend.set_engine(replace(said, context_tokens=tokens))
            pool.compare_engines(backend.model)
        if self._fail("length", "") is Step.ENGINE_ERROR:
            if backend.model not in pool.unlike_contexts or not exchange.sender.is_relayed:
                return False
            exchange.end_with_error(none_takes_it(message, pool.of(backend.model)))
        return True

    def _repeat_without(self, refused: list[bytes]) -> None:
        """Send the request to the same backend once more, without parameters that the gateway has added."""
        self.cancel()
        self.delivery.restart()
        self._declined = self._declined.union(refused)
        self._take()
        self.send([])

    def _fail(self, kind: str, message: str, *, is_proof: bool = False, otherwise: Step | None = None) -> Step:
        return self.exchange.failed(self, kind, message, is_proof=is_proof, otherwise=otherwise)

    def _send_head(self) -> None:
        if (self.is_on_trial or self.delivery.retried_from) and self.delivery.is_served():
            # The rest of a long answer is no further evidence.
            self.exchange.note_served(self.upstream.backend if self.is_on_trial else None)
        self.delivery.send_head(self.upstream, self.decision)

    def _redirects_here(self, headers: HeaderList) -> bool:
        authority = self.upstream.client.address.authority
        locations = [value for name, value in headers if name == b"location"]
        return all(relative_location(location, authority) is not None for location in locations)
