"""The exchange: one request from its admission to its end.

It decides which backend gets the request, whether another one gets it after a failure, and when it is given up. The
call to one backend is an `Attempt`; its answer is received by a `Reception`, and reaches the client through a
`Delivery`. While nothing has been passed on, the request can be retried, once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from typing import ClassVar, Final

from backends.backend import Backend, State
from backends.http.client import Call, UpstreamError
from gateway.dialects.asked_usage import asking
from gateway.dialects.errors import EXCEEDED, GatewayError, exceeded
from gateway.http.paths import endpoint_of
from gateway.relay.answers import PassThrough
from gateway.relay.attempt import Attempt, head_for
from gateway.relay.conclusion import conclude
from gateway.relay.context import Inbound, RelayContext, Reply
from gateway.relay.delivery import Delivery
from gateway.relay.errors import backend_failed, gateway_failed
from gateway.relay.evidence import FirstFailure, blame, evidence_of_status, judge_error, request_hash, strike
from gateway.relay.observers import LocationObserver
from gateway.relay.queue import ModelQueue, Place, rank_of
from gateway.relay.reception import Reception
from gateway.relay.rescue import Handover, count_impossible, handover_for
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from policies.features.request import Endpoint

log = logging.getLogger(__name__)

_OTHER: Final = Endpoint.OTHER
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FREE_RETRIES: Final = frozenset({"connect", "down", "trial"})  # the first replica does no work for them any more
_SMALL_BYTES: Final = 2**15
"""A body up to this is parsed at once, whatever it holds."""
_DOWN_TIMEOUT_S: Final = 5.0  # of an exchange whose backend fails its health checks, or that could stay where it was


class Exchange:
    """One request from arrival to outcome."""

    is_relayed: ClassVar[bool] = True  # whether the gateway itself sends the request, and can send it again

    __slots__ = (
        "_deadline_s",
        "_handover",
        "_has_no_retry",
        "_has_turn",
        "_inbound",
        "_place",
        "_queue",
        "_relay",
        "_retried",
        "_routed",
        "_timer",
        "_times",
        "attempt",
        "delivery",
    )

    def __init__(self, relay: RelayContext, inbound: Inbound, reply: Reply) -> None:
        self._relay = relay
        self._inbound = inbound
        new_id, own_id = relay.new_request_id(), inbound.request_headers.request_id
        inbound.engine_id = b"%b-%b" % (new_id[:16], own_id) if own_id else new_id
        self.delivery = Delivery(
            reply, inbound, own_id or new_id, endpoint_of(inbound.path, inbound.request_headers.method)
        )
        self._times = self.delivery.times
        self._routed: RoutedRequest | None = None
        self.attempt: Attempt | None = None
        self._retried: FirstFailure | None = None
        self._handover: Handover | None = None
        self._has_no_retry = False
        self._has_turn = False  # to come, with a large body
        self._deadline_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._queue: ModelQueue | None = None
        self._place: Place | None = None

    # Called by the frontend

    def begin(self) -> None:
        """Check the limits of the key before anything is parsed; then route and send, or answer with an error."""
        relay, client = self._relay, self._inbound.request_headers.client
        try:
            relay.limits.enter(client)
        except GatewayError as error:
            self._refuse(error)
            return
        if len(self._inbound.body) <= _SMALL_BYTES:
            self._admit()
        else:
            self._has_turn = True
            relay.turns.add(client.name, self._admit_in_turn())

    def _admit_in_turn(self) -> Iterator[None]:
        """Find out, step by step, what it costs to parse the body before that is done; then admit the request."""
        relay = self._relay
        try:
            for _ in relay.router.check(self._inbound.body):
                if not self._has_turn:
                    return
                yield
        except GatewayError as error:
            self._has_turn = False
            relay.limits.leave(self._inbound.request_headers.client, 0)
            self._refuse(error)
            return
        if self._has_turn:
            self._has_turn = False
            self._admit()

    def _admit(self) -> None:
        relay = self._relay
        try:
            self._route_and_send()
        except Exception as error:
            if not isinstance(error, GatewayError):  # a defect of the gateway, which must be answered too
                log.exception("a request could not be sent on", extra={"fields": self._log_fields()})
                error = gateway_failed()
            if self in relay.exchanges:
                self.end_with_error(error)
            else:
                self._refuse(error)

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request that was not admitted."""
        self._relay.count_refused_request(self._inbound, self.delivery.request_id, error)
        self.delivery.answer_with(error, self.attempt)

    def _route_and_send(self) -> None:
        relay, inbound, headers = self._relay, self._inbound, self._inbound.request_headers
        now_s = time.monotonic()
        try:
            routed = relay.router.route(
                inbound.path, headers.method, inbound.body, headers.client, headers.routing_headers, now_s
            )
        except BaseException:
            relay.limits.leave(headers.client, 0)
            raise
        self._routed, endpoint, observers = routed, self.delivery.endpoint, self.delivery.observers
        if relay.reporter is not None:
            observers.all.extend(relay.reporter.follow(inbound, self.delivery.request_id))
        if routed.model.rescue and self.is_relayed and not headers.routing_headers.backend:
            self._handover = handover_for(relay, inbound, self.delivery.request_id, endpoint, routed, observers)
        routed.model.traffic.arrive(now_s)
        routed.model.traffic.in_flight += 1
        relay.exchanges.add(self)
        if headers.timeout_s < relay.timeouts.total_s:
            self._timer = relay.call_later(headers.timeout_s, self._expire)
        elif relay.timeouts.total_s < math.inf:
            self._deadline_s = inbound.arrived_s + relay.timeouts.total_s  # checked by `check_silence`
        if endpoint is not _OTHER or (headers.method == "POST" and inbound.body):
            if relay.queues:
                self._queue = relay.queues.get(routed.model.name)
            observers.add(relay.followers.get(routed.model.name, ()), routed, inbound.body)
            if endpoint is Endpoint.RESPONSES:
                observers.all.append(LocationObserver(relay.router.locations))
        if self._queue is None:
            self._send(self.candidates(()))
        else:
            self._send_or_wait(self._queue)

    def _send_or_wait(self, queue: ModelQueue) -> None:
        """Send the request if a backend has few enough; else wait for one."""
        relay, inbound, headers, routed = self._relay, self._inbound, self._inbound.request_headers, self._routed
        assert routed is not None
        rank = rank_of(headers.client.priority, routed.priority)
        if self.delivery.endpoint is not _OTHER:
            inbound.body = queue.body_for_engine(inbound.body, routed.priority, rank)
        if free := self.free_candidates():
            self._send(free)
            return
        members = relay.router.members(routed, headers.client, headers.routing_headers)
        self._place = queue.enter(self, members, rank, len(inbound.body))

    def _log_fields(self) -> dict[str, str]:
        """Return what the log says of the request."""
        model = "" if self._routed is None else self._routed.model.name
        return {"request_id": self.delivery.request_id.decode("latin-1"), "model": model}

    def free_candidates(self) -> list[Backend]:
        """Return the backends that the request may be sent to now, and that have few enough."""
        queue = self._queue
        assert queue is not None
        try:
            free = queue.free(self.candidates(()))
            if not free and self._relay.pool.recovery.replicas:  # the one on trial may be full
                free = queue.free(self.candidates((), may_try=False))
        except GatewayError:  # raised again where the client is told
            return []
        return free

    def send_after_waiting(self, candidates: list[Backend], waited_s: float) -> None:
        """Send the request, which has left the queue."""
        assert self._routed is not None
        self._place = None
        self._times.waited_s = waited_s
        self._relay.metrics.queue_wait.labels(self._routed.model.name).observe(waited_s)
        try:
            self._send(candidates)
        except Exception:  # a defect, as in `begin`
            log.exception("a request could not be sent on", extra={"fields": self._log_fields()})
            self.end_with_error(gateway_failed())

    def client_gone(self) -> None:
        """Cancel the request, since its client has disconnected."""
        if self in self._relay.exchanges:
            self.cancel_call()
            if (answer := self.delivery.complete_stream()) is not None:
                self.succeed(answer)
            else:
                self._finish(499, "cancelled")
        elif self._has_turn:
            self._has_turn = False
            self._relay.limits.leave(self._inbound.request_headers.client, 0)

    def pause(self) -> None:
        """Pause reading the answer while the client is slow to receive it."""
        if (call := self._call) is not None:
            self.delivery.was_paused = True
            call.pause()

    def resume(self) -> None:
        """Resume reading the answer."""
        if self.attempt is not None:
            self.attempt.resume()

    # Attempts

    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends that the request may be sent to, without those tried."""
        assert self._routed is not None
        headers = self._inbound.request_headers
        routing_headers = headers.routing_headers
        may_try = may_try and not (tried or self.delivery.endpoint is _OTHER or routing_headers.backend)
        return self._relay.router.candidates(self._routed, headers.client, routing_headers, tried, may_try=may_try)

    def _send(self, candidates: list[Backend]) -> None:
        relay, inbound, routed, delivery = self._relay, self._inbound, self._routed, self.delivery
        assert routed is not None
        decision = relay.router.choose(routed, candidates, inbound.request_headers.routing_headers)
        upstream = routed.model.upstreams[decision.backend]
        attempt = self.attempt = Attempt(upstream, decision, relay.pool.recovery)
        delivery.answer = None
        self._times.first_s = 0.0
        delivery.observers.on_send(decision, candidates)
        attempt.take()
        if self._retried is None:
            relay.metrics.overhead.labels(routed.model.name).observe(
                attempt.last_read_s - inbound.arrived_s - self._times.waited_s
            )
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        attempt.call = self.call(attempt, candidates)

    def call(self, attempt: Attempt, candidates: list[Backend]) -> Call:
        """Send the request to the backend of an attempt, which was chosen among the candidates."""
        relay, inbound, handover, upstream = self._relay, self._inbound, self._handover, attempt.upstream
        body = inbound.body if handover is None else handover.rescue.request.body
        options = None if self._routed is None else self._routed.usage_options
        attempt.is_asked = options is not None and upstream.habits.may_ask and not attempt.has_refused
        if options is not None and attempt.is_asked:
            body = asking(body, options)
        head = head_for(upstream, relay, inbound, inbound.target, body)
        receiver, is_head = self.reception(), inbound.request_headers.method == "HEAD"
        once = not self._may_repeat()
        return upstream.client.send(head, body, receiver, head_only=is_head, whole=receiver, once=once)

    def repeat_unasked(self) -> None:
        """Send the request to the same backend once more, which has refused to be asked for its usage."""
        attempt = self.attempt
        assert attempt is not None
        attempt.cancel()
        self.delivery.answer = None
        attempt.has_refused = True
        attempt.take()
        attempt.call = self.call(attempt, [])

    def reception(self) -> Reception:
        """Return the receiver for the answer of the present attempt."""
        assert self.attempt is not None
        return Reception(self, self.attempt, self.delivery, self._handover)

    @property
    def _call(self) -> Call | None:
        """The call in flight; None without one."""
        return None if self.attempt is None else self.attempt.call

    @property
    def _upstream(self) -> Upstream | None:
        """The backend that has the request, or had it last; None before the first."""
        return None if self.attempt is None else self.attempt.upstream

    def cancel_call(self) -> None:
        """Cancel whatever is in flight."""
        if self._handover is not None:
            self._handover.leave_place()
        if self.attempt is not None:
            self.attempt.cancel()

    def _may_repeat(self) -> bool:
        """Return whether the request may run twice: inference only costs time, other requests may have an effect."""
        return self.delivery.endpoint is not _OTHER or self._inbound.request_headers.method in _SAFE

    def _retry(self, kind: str, message: str = "") -> bool:
        """Send the request to another backend; return whether it was sent.

        It is not sent if part of the answer was passed on, if it was retried before, if it names its backend, or if it
        may already have had an effect.
        """
        attempt, headers = self.attempt, self._inbound.request_headers
        assert attempt is not None
        if self.delivery.has_begun or self._retried is not None or headers.routing_headers.backend:
            return False
        if not self.is_relayed:
            return False
        if kind != "connect" and not self._may_repeat():
            return False
        try:
            candidates = self.candidates((attempt.upstream.backend.name,))
        except GatewayError:
            return False
        if kind not in _FREE_RETRIES and not attempt.is_on_trial and not self._take_retry():
            return False
        self._retried = FirstFailure(attempt.upstream.backend, message)
        self.delivery.retried_from = attempt.upstream.backend.name
        self.cancel_call()
        self._relay.metrics.retries.labels(*attempt.upstream.metrics.labels, kind).inc()
        self.delivery.observers.on_retry(kind)
        queue = self._queue
        self._send(candidates if queue is None else queue.free(candidates) or candidates)
        if queue is not None:
            queue.dispatch()
        return True

    def _take_retry(self) -> bool:
        """Take a retry from the model's budget; return whether there was one left."""
        assert self._routed is not None
        model = self._routed.model
        if model.retry_budget.take(time.monotonic()):
            return True
        self._has_no_retry = True
        self._relay.metrics.retries_refused.labels(model.name).inc()
        return False

    def retry_status(self, status: int) -> bool:
        """Send the request to another backend after a 5xx of the engine; return whether it was sent."""
        assert self.attempt is not None
        pool, backend = self._relay.pool, self.attempt.upstream.backend
        pool.report_failure(backend)
        return self._retry("status", evidence_of_status(pool, backend, status))

    def retry_or_fail(self, kind: str, message: str, *, is_strike: bool = False) -> None:
        """Send the request to another backend if possible; else end with an error."""
        assert self.attempt is not None
        if kind == "exhausted":  # the gateway's own limit: no backend is at fault, and none can be reached
            self.fail(kind, message)
            return
        if self._end_if_complete():
            return
        pool, backend, first = self._relay.pool, self.attempt.upstream.backend, self._retried
        if kind == "connect":
            if not (self._retry(kind) or self._continue(message)):
                self.fail(kind, message)
            pool.report_unreachable(backend, message)
            return
        if not (self._retry(kind, message) or self._continue(message, is_strike=is_strike)):
            self.fail(kind, message)
            has_no_other = first is None or not first.message
            if is_strike and has_no_other and not self._has_no_retry and self.delivery.endpoint is not _OTHER:
                strike(pool, backend, self._inbound, message)
        pool.report_failure(backend)

    def backend_is_down(self, backend: Backend) -> None:
        """Retry on another backend if this exchange waits for the first byte from `backend`."""
        if not self._is_at(backend) or (self.delivery.has_begun and not self._waits_for_rescue()):
            return
        if not (self._retry("down") or self._continue(backend.state_reason)):
            self.fail("down", backend.state_reason)

    def move(self, backend: Backend) -> bool:
        """Continue a stream on a backend other than `backend`, which is healthy; return whether it continues there."""
        if self._handover is None or not self._is_at(backend):
            return False
        return self._retry("moved") or self._handover.go_on(self, "is being drained", may_return=True)

    def _is_at(self, backend: Backend) -> bool:
        attempt = self.attempt
        return attempt is not None and attempt.call is not None and attempt.upstream.backend is backend

    def _continue(self, message: str, *, is_strike: bool = False) -> bool:
        """Continue a stream on another backend; return whether it continues there."""
        if self._handover is not None:
            return self._handover.go_on(self, message, is_strike=is_strike)
        assert self._routed is not None
        if self._routed.model.rescue and self.delivery.has_begun and self._upstream is not None:
            count_impossible(self._relay, self._upstream)
        return False

    def _waits_for_rescue(self) -> bool:
        return self._handover is not None and self._handover.rescue.is_waiting

    def check_silence(self, now_s: float) -> None:
        """Fail if the backend has been silent for too long.

        It may be slow, so another one gets the request only if this one is down: else overload would double the load.
        """
        if now_s >= self._deadline_s:
            self._expire()
            return
        if self._place is not None:
            self._check_wait(now_s, self._place)
        attempt, handover = self.attempt, self._handover
        if attempt is None or attempt.call is None or attempt.call.paused:
            return
        silent_s = now_s - attempt.last_read_s
        if handover is not None and handover.left is not None and silent_s > _DOWN_TIMEOUT_S:
            handover.go_back()
            return
        timeouts = self._relay.timeouts
        has_begun = self._times.first_s and not self._waits_for_rescue()
        limit_s = timeouts.idle_s if has_begun else timeouts.first_byte_s
        backend = attempt.upstream.backend
        is_down = backend.state is State.DOWN
        if is_down:
            limit_s = min(limit_s, _DOWN_TIMEOUT_S)
        if attempt.is_on_trial and silent_s > _DOWN_TIMEOUT_S and self._end_trial_in_silence(backend, silent_s):
            return
        if silent_s <= limit_s:
            return
        if self._end_if_complete() or (is_down and (self._retry("down") or self._continue(backend.state_reason))):
            return
        message = f"sent nothing for {limit_s:g} s"
        self.fail("timeout", message)
        if self.delivery.endpoint is _OTHER:
            self._relay.pool.report_failure(backend)
        else:
            self._relay.pool.report_timeout(backend, request_hash(self._inbound), message)

    def _expire(self) -> None:
        """Fail since the request's time is over, which is no evidence against a backend."""
        self._timer = None
        if self not in self._relay.exchanges:
            return  # it has ended in the same sweep
        if self._place is not None and self._queue is not None:
            self._queue.refused["deadline"] += 1
        self.end_with_error(exceeded(min(self._inbound.request_headers.timeout_s, self._relay.timeouts.total_s)))

    def _check_wait(self, now_s: float, place: Place) -> None:
        """Fail if the request has waited for too long."""
        queue = self._queue
        assert queue is not None
        if not queue.is_over(place, now_s):
            return
        error = queue.refusal("timeout", f"The request waited for {now_s - place.since_s:.0f} s for a backend.")
        try:
            self.candidates(())
        except GatewayError as none_up:
            error = none_up
        self.end_with_error(error)

    def _end_trial_in_silence(self, backend: Backend, silent_s: float) -> bool:
        """Retry a request on trial whose backend is silent and shows no progress; return whether it was."""
        pool = self._relay.pool
        if self.delivery.has_begun or silent_s <= _DOWN_TIMEOUT_S + pool.rules.interval_s:
            return False
        if pool.is_progressing(backend) or not self._retry("trial"):
            return False
        strike(pool, backend, self._inbound, f"sent nothing for {silent_s:.0f} s")
        return True

    def attempt_failed(self, error: UpstreamError) -> None:
        """Retry on another backend, or fail; called for the backend that the stream is at, or is being moved to."""
        # A server may cut an answer that nobody reads: then the client was too slow.
        is_strike = error.kind in {"broken", "garbage"} and not self.delivery.was_paused
        self.retry_or_fail(error.kind, str(error), is_strike=is_strike)

    # Ending the exchange

    def fail(self, kind: str, message: str) -> None:
        """End with the error for a failure of the backend."""
        assert self.attempt is not None
        name, may_repeat = self.attempt.upstream.backend.name, self._may_repeat()
        self.end_with_error(
            backend_failed(name, kind, message, has_begun=self.delivery.has_begun, may_repeat=may_repeat)
        )

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error: as the answer, as an event of a stream that has begun, else by closing the connection."""
        if not self.delivery.has_begun:
            self.cancel_call()
            self.delivery.answer_with(error, self.attempt)
            self._finish(error.status, "unanswered", is_over=error.code == EXCEEDED)
            return
        if self._end_if_complete():
            return
        self.cancel_call()
        self.delivery.interrupt(error)
        self._finish(error.status, "interrupted")

    def note_served(self) -> None:
        """Report that the backend has begun to serve the request: on trial, or after another one failed."""
        attempt, pool = self.attempt, self._relay.pool
        if attempt is not None and attempt.is_on_trial:
            pool.report_success(attempt.upstream.backend)
        if self._retried is not None:
            blame(pool, self._retried, self._inbound)

    def _end_if_complete(self) -> bool:
        """End the exchange if its stream has passed on its last event; return whether it has.

        What happens after that event (no end of the HTTP message, a cut, silence) matters to no client.
        """
        answer = self.delivery.complete_stream()
        if answer is None:
            return False
        self.cancel_call()
        self.delivery.end()
        self.succeed(answer)
        return True

    def succeed(self, answer: PassThrough) -> None:
        """End with an answer that was passed on."""
        attempt, delivery = self.attempt, self.delivery
        assert attempt is not None
        attempt.release()
        delivery.answer = answer
        if delivery.is_served():
            self._relay.pool.report_success(attempt.upstream.backend)
            if self._retried is not None:
                blame(self._relay.pool, self._retried, self._inbound)
            if self._handover is not None:
                self._handover.report_strikes()
            self._learn_habits(attempt, answer)
            self._finish(delivery.status, "ok")
            return
        if answer.error_status:
            judge_error(self._relay.pool, attempt.upstream.backend, self._inbound, answer.error_status, self._retried)
        self._finish(delivery.status, delivery.label())

    def _learn_habits(self, attempt: Attempt, answer: PassThrough) -> None:
        """Learn what the engine tells unasked, from a complete stream of its own."""
        events, handover = answer.events, self._handover
        if events is None or attempt.is_asked or self._routed is None or self._routed.usage_options is None:
            return
        if handover is None or not handover.rescue.failures:
            attempt.upstream.habits.learn(events.last_events())

    def _finish(self, status: int, label: str, *, is_over: bool = False) -> None:
        """Conclude the exchange, which gives up its place in the queue; `is_over` if its time was."""
        assert self._routed is not None
        self._relay.exchanges.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        conclude(
            self._relay,
            self._inbound,
            self._routed,
            self.attempt,
            self.delivery,
            self._handover,
            status,
            label,
            is_over=is_over,
        )
        if self._queue is not None:
            if self._place is not None:
                self._queue.leave(self._place)
                self._place = None
            self._queue.dispatch()
