"""The exchange: one request from the choice of its backend to its end.

It decides which backend gets the request; `gateway.relay.failover` handles failures. Each routed request has one, with
one `Delivery`, which alone writes to the client, and an `Attempt` per backend: a retry or a rescue makes a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from backends.backend import Backend
from backends.health import State, Strike
from gateway.dialects.errors import EXCEEDED, GatewayError, exceeded
from gateway.relay.accounting import conclude
from gateway.relay.answers import PassThrough
from gateway.relay.attempt import Attempt
from gateway.relay.context import RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.engine_errors import OVERLOADED
from gateway.relay.failover import Failing, Failover, answerable, fingerprint
from gateway.relay.failures import Failure, Outlook, Step
from gateway.relay.observers import Traced, tell_send
from gateway.relay.outgoing import learn_habits
from gateway.relay.roles import Rescuer, Sender
from gateway.relay.silence import failures_of, is_late_on_trial, is_stalled
from gateway.relay.waiting.queue import ModelQueue, Place
from gateway.relay.waiting.shares import Charge
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import Endpoint
from policies.policy import Decision

_now_s: Final = time.perf_counter
_OTHER: Final = Endpoint.OTHER


class Exchange(Failing):
    """One request from its routing to its outcome."""

    def __init__(
        self,
        relay: RelayContext,
        body: bytes,
        routed: RoutedRequest,
        delivery: Delivery,
        sender: Sender,
        rescuer: Rescuer | None,
        queue: ModelQueue | None,
        *,
        closed: tuple[str, ...],
        traced: Traced | None,
    ) -> None:
        request, request_id = delivery.request, delivery.request_id
        self.relay = relay
        self.request = request
        self.body = body
        self.routed = routed
        self.delivery = delivery
        self.sender = sender
        self.rescuer = rescuer  # resumes the stream at another backend; None without one, and at the end
        self.queue = queue  # the model's; None without one
        # The id of the request for engines, which may reject duplicates: random digits, then the client's own id.
        own = request.request_id
        self.engine_id = b"%b-%b" % (relay.new_request_id()[:16], own) if own else request_id
        self.attempt: Attempt | None = None  # the current attempt; None before the first, and at the end
        self.place: Place | None = None  # in the queue, while the request waits; None otherwise
        self.traced = traced  # traces the request; None if it is not traced
        self.closed = closed  # names of backends that have no room for it
        self.is_open = True  # False once it has ended
        self._charge: Charge | None = None  # charged to its client in the queue's shares
        self._failover: Failover | None = None  # handles its failures; None before the first
        self.arrived_s = delivery.arrived_s
        self.timer: asyncio.TimerHandle | None = None  # for a deadline set by the request
        self._deadline_s = math.inf  # by `time.perf_counter`
        if request.timeout_s < relay.timeouts.total_s:
            left_s = request.timeout_s - (_now_s() - delivery.arrived_s)
            self.timer = asyncio.get_running_loop().call_later(left_s, self.expire)
        else:
            self._deadline_s = delivery.arrived_s + relay.timeouts.total_s  # checked by `check_silence`

    # Called by the frontend

    def client_gone(self) -> None:
        """Cancel the request, since its client has disconnected."""
        if not self.is_open:
            return
        attempt = self.attempt
        if attempt is not None:
            attempt.cancel()
            if (answer := self.delivery.complete_stream()) is not None:
                self.succeed(attempt, answer)
                return
        self._finish(499, "cancelled")

    def pause(self) -> None:
        """Pause reading the answer while the client is slow to receive it."""
        if self.attempt is not None and self.attempt.call is not None:
            self.delivery.pause(is_paused=True)
            self.attempt.call.pause()

    def resume(self) -> None:
        """Resume reading the answer."""
        self.delivery.pause(is_paused=False)
        if self.attempt is not None:
            self.attempt.resume()

    # Attempts

    def members(self) -> Sequence[Backend]:
        """Return the backends that can serve the request, whatever their state."""
        return self.relay.router.members(self.routed)

    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends to which the request may be sent, without those tried."""
        may_try = may_try and not (tried or self.delivery.endpoint is _OTHER or self.routed.headers.backend)
        return self.sender.candidates(self.relay.router, self.routed, tried + self.closed, may_try=may_try)

    def close_to(self, backends: tuple[str, ...]) -> None:
        """Exclude backends from those that may get the request."""
        self.closed = backends

    def begin(self, rank: int) -> None:
        """Send the request, or let it wait for its turn."""
        if self.queue is not None:
            self.place = self.queue.send_or_enter(self, rank)
            return
        try:
            candidates = self.candidates(())
        except GatewayError as none_up:
            is_held = none_up.status == 503 and self.sender.is_relayed
            if not is_held or not self.relay.first_start.hold(self, self.routed.model.name):
                raise
        else:
            self.send(candidates)

    def take_turn(self, waited_s: float, candidates: list[Backend] | None = None, charge: Charge | None = None) -> None:
        """Send the request after a wait, or answer why that is impossible."""
        delivery, self._charge = self.delivery, charge
        delivery.wait(waited_s)
        if self.place is not None:
            self.place = None
            self.relay.metrics.queue_wait.labels(self.routed.model.name).observe(waited_s)
        try:
            self.send(self.candidates(()) if candidates is None else candidates)
        except Exception as error:  # noqa: BLE001 -- a defect of the gateway must be answered too
            self.end_with_error(answerable(error, delivery.request_id, self.routed.model.name))

    def send(self, candidates: list[Backend]) -> None:
        """Send the request to one of the candidates."""
        attempt, delivery = self.choose(candidates), self.delivery
        if delivery.retried_from:
            delivery.restart()
        else:
            overhead_s = attempt.last_read_s - delivery.arrived_s - delivery.waited_s
            self.relay.metrics.overhead.labels(self.routed.model.name).observe(overhead_s)
        attempt.send(candidates)

    def choose(self, candidates: list[Backend], reason: str = "") -> Attempt:
        """Begin an attempt at one of the candidates; `reason` replaces that of the policy."""
        relay, routed = self.relay, self.routed
        if self.attempt is not None:
            routed.model.left(self.attempt.decision)
        decision = relay.router.choose(routed, candidates)
        if reason:
            decision = replace(decision, reason=reason)
        tell_send(self.delivery.observers, decision, candidates)  # before the load of the backend changes
        attempt = self.attempt = Attempt(self, self.delivery, routed.model.upstreams[decision.backend], decision)
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        return attempt

    def served_by(self, upstream: Upstream, decision: Decision) -> None:
        """Switch to the backend to which a proxy sent the request, since it could not reach the one chosen."""
        first = self.attempt
        if first is None:
            return
        first.release()
        self.routed.model.left(first.decision)
        self.relay.pool.report_failure(first.upstream.backend)
        self.relay.metrics.retries.labels(*first.upstream.metrics.labels, "proxy").inc()
        self.delivery.retry_from(first.upstream.backend.name)
        tell_send(self.delivery.observers, decision, [upstream.backend])
        self.attempt = Attempt(self, self.delivery, upstream, decision, is_sent=True)

    # Failures

    def failed(self, attempt: Attempt, failure: Failure) -> Step:
        """Handle a backend's failure and return the step taken: see `gateway.relay.failover`."""
        if self._failover is None:
            self._failover = Failover(self)
        return self._failover.handle(attempt, failure)

    def note_served(self) -> None:
        """Report the backends that failed the request, since another one serves it."""
        if self._failover is not None:
            self._failover.served()

    def backend_is_down(self, backend: Backend) -> None:
        """Retry if this exchange waits for the first byte of a backend that is down."""
        attempt = self.attempt
        if attempt is None or attempt.call is None or attempt.upstream.backend is not backend:
            return
        is_waiting = not self.delivery.has_begun or (self.rescuer is not None and self.rescuer.is_waiting)
        if is_waiting and self.sender.is_relayed:  # else the proxy must send it elsewhere
            self.failed(attempt, Failure("down", backend.health.reason))

    def check_silence(self, now_s: float) -> None:
        """Handle a backend that has been silent for too long.

        It may just be slow, so another one gets the request only if it is down: else overload would double the load.
        """
        if now_s >= self._deadline_s:
            self.expire()
            return
        attempt, pool, timeouts = self.attempt, self.relay.pool, self.relay.timeouts
        if attempt is None or attempt.call is None or attempt.call.paused:
            return
        silent_s, backend, delivery = now_s - attempt.last_read_s, attempt.upstream.backend, self.delivery
        if silent_s > pool.rules.silence_s and backend.engine.metrics and not pool.watch(backend).is_progressing:
            pool.report_failure(backend)  # its probe will show whether it is stuck
        rescuer, events = self.rescuer, None if delivery.answer is None else delivery.answer.events
        is_answering = delivery.first_s > 0.0 and not (rescuer is not None and rescuer.is_waiting)
        is_late = attempt.is_on_trial and is_late_on_trial(silent_s, pool.rules.interval_s)
        stands = False
        if is_answering and rescuer is not None and events is not None and rescuer.outlook() is not Outlook.NONE:
            others_silent_s = None if backend.in_flight == 1 else now_s - backend.read_s
            stands = is_stalled(silent_s, attempt.last_read_s - delivery.first_s, events.events, others_silent_s)
        failures = failures_of(
            silent_s,
            timeouts.idle_s if is_answering else timeouts.first_byte_s,
            backend.health.reason if backend.health.state is State.DOWN else None,
            is_stalled=stands,
            is_late=is_late and not pool.watch(backend).is_progressing,
        )
        for failure in failures:
            if self.failed(attempt, failure) not in {Step.WAIT, Step.TIME_OUT}:
                return

    def expire(self) -> None:
        """Fail because the request's time is up, which is no evidence against a backend."""
        self.timer = None
        if not self.is_open:
            return  # it has ended in the same sweep
        if self.place is not None and self.queue is not None:
            self.queue.count_deadline()
        self.end_with_error(exceeded(min(self.request.timeout_s, self.relay.timeouts.total_s)))

    # The end

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error: as the answer, as an event of a stream that has begun, or by closing the connection."""
        delivery, attempt, has_begun = self.delivery, self.attempt, self.delivery.has_begun
        error = self.sender.shown(error)
        if attempt is not None:
            if delivery.answer is not None and self.sender.goes_on(error):
                self.succeed(attempt, delivery.answer)
                return
            attempt.cancel()
        if attempt is not None and delivery.complete_stream() is not None:
            attempt.complete()
        elif has_begun:
            delivery.interrupt(error)
            self._finish(error.status, "interrupted")
        else:
            choice_lines = b""
            if attempt is not None:
                choice_lines = attempt.upstream.lines_of_choice(attempt.decision, delivery.retried_from)
            delivery.answer_with(error, choice_lines)
            label = "unanswered" if error.status >= 500 else label_of(error.status)
            self._finish(error.status, label, is_over=error.code == EXCEEDED)
        if has_begun:
            self.sender.cut_off()

    def succeed(self, attempt: Attempt, answer: PassThrough) -> None:
        """End with an answer that was passed on."""
        delivery, backend = self.delivery, attempt.upstream.backend
        attempt.release()
        label = label_of(max(delivery.status, answer.error_status))
        is_first_suspect = self._failover is None or not self._failover.was_suspected
        if label == "ok" and delivery.endpoint is not _OTHER and delivery.status < 300:
            self.relay.pool.report_success(backend)
            self.note_served()
            if answer.events is not None:
                may_ask, habits = self.routed.usage_options is not None, attempt.upstream.habits
                learn_habits(habits, answer.events, attempt.added, self.rescuer, may_ask=may_ask)
        elif answer.error_status >= 500 and answer.error_status != OVERLOADED and is_first_suspect:
            self.relay.pool.report(backend, Strike(fingerprint(self), "ended a stream with an error"))
        self._finish(delivery.status, label)

    def _finish(self, status: int, label: str, *, is_over: bool = False) -> None:
        """End in guarded steps, even if one raises; `is_over` if the request's time was up."""
        relay, queue, delivery = self.relay, self.queue, self.delivery
        self.is_open = False
        relay.exchanges.discard(self)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        attempt, rescued = self.attempt, None if self.rescuer is None else self.rescuer.rescued()
        upstream, decision = (None, None) if attempt is None else (attempt.upstream, attempt.decision)
        delivery.note_end(self.routed, upstream, decision, rescued, status, label)
        # They refer to the exchange: leave no cycle for the garbage collector.
        self.attempt = self.rescuer = self._failover = None
        conclude(delivery, relay, self.body, is_over=is_over)
        if queue is not None:
            if self._charge is not None:
                self._charge.party.settle(self._charge.price, delivery.answer_tokens)
            if self.place is not None:
                queue.leave(self.place)
                self.place = None
            queue.dispatch()


def label_of(status: int) -> str:
    """Return the outcome of a complete answer, as metrics name it."""
    if status >= 500:
        return "engine_error"
    return "ok" if status < 400 else "client_error"
