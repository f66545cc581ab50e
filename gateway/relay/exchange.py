"""The exchange: one request from its admission to its end.

It decides which backend gets the request, and carries out what follows from a failure (`gateway.relay.failures`). There
is one for each request, with one `Delivery`, which alone writes to the client; and an `Attempt` for each backend that
gets the request, of which a retry or a rescue makes a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import replace
from typing import ClassVar, Final

from backends.backend import Backend, State
from backends.health import Strike, Unreachable
from backends.http.client import Call
from gateway.dialects.asked_usage import IDS, USAGE, asking
from gateway.dialects.errors import EXCEEDED, GatewayError, exceeded, gateway_failed
from gateway.relay.accounting import conclude
from gateway.relay.answers import PassThrough
from gateway.relay.attempt import OVERLOADED, Attempt
from gateway.relay.context import Inbound, Refused, RelayContext, Reply, Rescuer
from gateway.relay.delivery import Delivery
from gateway.relay.failures import (
    RULES,
    Blame,
    Outlook,
    Report,
    Situation,
    Step,
    Verdict,
    backend_failed,
    verdict_on,
)
from gateway.relay.observers import tell
from gateway.relay.queue import ModelQueue, Place
from gateway.relay.shares import Charge
from gateway.routing.router import RoutedRequest
from policies.arm import arm_of
from policies.features.request import Endpoint
from policies.roles import Price

log = logging.getLogger(__name__)

_OTHER: Final = Endpoint.OTHER
_MAY_BE_METHOD: Final = frozenset({"status", "error", "garbage"})
"""Failures that may be owed to how a backend speculates: the retry goes to one that does otherwise, if there is one."""
STALL_S: Final = 3.0
STALL_GAPS: Final = 30.0
"""A pause within a stream is a stall if it is longer than both: seconds, and mean times between events."""
_ALIVE_S: Final = 1.0
"""Seconds without any answer after which a backend is silent for all."""
_DOWN_TIMEOUT_S: Final = 5.0  # of an exchange whose backend fails its health checks


class Exchange:
    """One request from arrival to outcome."""

    is_relayed: ClassVar[bool] = True  # whether the gateway itself sends the request, and can send it again

    def __init__(self, relay: RelayContext, inbound: Inbound, reply: Reply) -> None:
        self.relay = relay
        self.inbound = inbound
        new_id, own_id = relay.new_request_id(), inbound.request_headers.request_id
        inbound.engine_id = b"%b-%b" % (new_id[:16], own_id) if own_id else new_id
        self.delivery = Delivery(reply, inbound, own_id or new_id)
        self.routed: RoutedRequest | None = None  # None before it is routed
        self.attempt: Attempt | None = None  # the present attempt; None before the first, and at the end
        self.rescuer: Rescuer | None = None  # has another backend go on with the stream; None if nothing does
        self.queue: ModelQueue | None = None  # that of the model; None without one
        self.place: Place | None = None  # in the queue, while the request waits; None otherwise
        self.price: Price | None = None  # what it is expected to cost, where it is charged
        self.charge: Charge | None = None  # what its client was charged in the queue's shares
        self.closed: tuple[str, ...] = ()  # names of backends that have no room for it
        self.has_turn = False  # to come, with a large body
        self.deadline_s = math.inf  # by `time.perf_counter`
        self.timer: asyncio.TimerHandle | None = None  # for a deadline that the request sets itself
        # Backends that have failed the request, and how: strikes, once another one has served it.
        self._suspects: list[tuple[Backend, str]] = []
        self._was_suspected = False  # whether there was one, also if it has got its strike

    # Called by the frontend

    def refuse(self, error: GatewayError) -> None:
        """Answer a request that was not admitted."""
        headers, arrived_s, request_id = self.inbound.request_headers, self.inbound.arrived_s, self.delivery.request_id
        refused = Refused(request_id, headers.method, headers.path, headers.lines, arrived_s, headers.client.name)
        self.relay.note_refused(refused, error)
        self.delivery.answer_with(error, None)

    def client_gone(self) -> None:
        """Cancel the request, since its client has disconnected."""
        if self in self.relay.exchanges:
            if self.attempt is not None:
                self.attempt.cancel()
            if (answer := self.delivery.complete_stream()) is not None:
                self.succeed(answer)
            else:
                self._finish(499, "cancelled")
        elif self.has_turn:
            self.has_turn = False
            self.relay.limits.leave(self.inbound.request_headers.client, 0)

    def pause(self) -> None:
        """Pause reading the answer while the client is slow to receive it."""
        if self.attempt is not None and self.attempt.call is not None:
            self.delivery.is_paused = self.delivery.was_paused = True
            self.attempt.call.pause()

    def resume(self) -> None:
        """Resume reading the answer."""
        self.delivery.is_paused = False
        if self.attempt is not None and self.attempt.call is not None:
            self.attempt.last_read_s = time.perf_counter()  # the pause does not count as silence of the backend
            self.attempt.call.resume()

    # Attempts

    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends that the request may be sent to, without those tried."""
        assert self.routed is not None
        may_try = may_try and not (tried or self.delivery.endpoint is _OTHER or self.routed.headers.backend)
        return self.relay.router.candidates(self.routed, tried + self.closed, may_try=may_try)

    def send(self, candidates: list[Backend]) -> None:
        """Send the request to one of the candidates."""
        attempt, delivery = self.choose(candidates), self.delivery
        delivery.answer = None
        delivery.times.first_s = 0.0
        if not delivery.retried_from and self.routed is not None:
            overhead_s = attempt.last_read_s - self.inbound.arrived_s - delivery.times.waited_s
            self.relay.metrics.overhead.labels(self.routed.model.name).observe(overhead_s)
        attempt.call = self.call(attempt, candidates)

    def choose(self, candidates: list[Backend], reason: str = "") -> Attempt:
        """Begin an attempt at one of the candidates; `reason` replaces that of the policy."""
        relay, routed = self.relay, self.routed
        assert routed is not None
        decision = relay.router.choose(routed, candidates)
        if reason:
            decision = replace(decision, reason=reason)
        attempt = self.attempt = Attempt(self, routed.model.upstreams[decision.backend], decision)
        if self.delivery.observers:
            tell(self.delivery.observers, lambda observer: observer.on_send(decision, candidates))
        attempt.take()
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        return attempt

    def call(self, attempt: Attempt, candidates: list[Backend]) -> Call:
        """Send the request to the backend of an attempt, which was chosen among the candidates."""
        inbound, rescuer, body = self.inbound, self.rescuer, self.inbound.body
        options = None if self.routed is None else self.routed.usage_options
        if rescuer is not None or options is not None:
            habits = attempt.upstream.habits
            declined, attempt.added = habits.declined | attempt.declined, ()
            with_ids = None if rescuer is None or IDS in declined else rescuer.body
            if with_ids is not None:
                body, attempt.added = with_ids, (IDS,)
            if options is not None and habits.may_ask and USAGE not in declined:
                body, attempt.added = asking(body, options), (*attempt.added, USAGE)
        return attempt.send(inbound.target, body, attempt, attempt, once=not inbound.request_headers.may_repeat)

    # Failures

    def failed(self, kind: str, message: str, *, is_proof: bool = False, may_fail: bool = True) -> bool:
        """Do what follows from a failure of the present backend, by `gateway.relay.failures`.

        `message` is what the backend did, or nothing if that is never evidence. Return whether the exchange goes on or
        has ended; if an error is all that follows, and `may_fail` is unset, nothing is done.
        """
        attempt, delivery, routed, rescuer = self.attempt, self.delivery, self.routed, self.rescuer
        assert attempt is not None
        assert routed is not None
        backend, pool, budget = attempt.upstream.backend, self.relay.pool, routed.model.retry_budget
        tried = (backend.name, delivery.retried_from, *([] if rescuer is None else rescuer.left))
        try:
            others = self.candidates(tried)
        except GatewayError:
            others = []
        if kind in _MAY_BE_METHOD:
            arm = arm_of(backend)
            others = [other for other in others if arm_of(other) != arm] or others
        situation = Situation(
            delivery.has(),
            was_retried=bool(delivery.retried_from) and delivery.retried_from not in self.closed,
            may_move=self.is_relayed and not routed.headers.backend,
            may_repeat=self.inbound.request_headers.may_repeat,
            has_other=bool(others),
            has_budget=budget.has_one(time.monotonic()),
            is_on_trial=attempt.is_on_trial,
            outlook=Outlook.NONE if rescuer is None else rescuer.outlook(),
            is_proof=is_proof and delivery.endpoint is not _OTHER,
            is_first_suspect=not self._was_suspected,
        )
        verdict = verdict_on(kind, situation)
        if verdict.blame is Blame.IF_SERVED and message:
            self._suspects.append((backend, message))
            self._was_suspected = True
        is_over = self._carry_out(verdict, kind, message, others)
        if verdict.step is Step.FAIL and may_fail:
            error = backend_failed(
                backend.name, kind, message, has_begun=delivery.has_begun, may_repeat=situation.may_repeat
            )
            self.end_with_error(error)
            is_over = True
        if verdict.blame is Blame.NOW:
            pool.report(backend, Strike(self.inbound.fingerprint(), message))
        report = Report.NOTHING if verdict.step is Step.COMPLETE else RULES[kind].report
        if report is Report.UNREACHABLE:
            pool.report(backend, Unreachable(message))
        elif report is Report.TIMEOUT and delivery.endpoint is not _OTHER:
            pool.report_timeout(backend, self.inbound.fingerprint(), message)
        elif report is not Report.NOTHING:
            pool.report_failure(backend)
        return is_over

    def _carry_out(self, verdict: Verdict, kind: str, message: str, others: list[Backend]) -> bool:
        """Carry out a verdict; return whether that was anything but an error or to wait."""
        attempt, delivery, routed, rescuer = self.attempt, self.delivery, self.routed, self.rescuer
        assert attempt is not None
        assert routed is not None
        metrics, step = self.relay.metrics, verdict.step
        if verdict.lacks_budget:
            metrics.retries_refused.labels(routed.model.name).inc()
        if step is Step.RETRY:
            if not (RULES[kind].is_free or attempt.is_on_trial):
                routed.model.retry_budget.take()
            attempt.cancel()
            name = attempt.upstream.backend.name
            if RULES[kind].is_full:
                self.closed += (name,)
            if not (RULES[kind].is_full and delivery.retried_from):
                delivery.retried_from = name
            metrics.retries.labels(*attempt.upstream.metrics.labels, kind).inc()
            tell(delivery.observers, lambda observer: observer.on_retry(kind))
            self.send(others if self.queue is None else self.queue.free(others) or others)
            if self.queue is not None:
                self.queue.dispatch()
        elif step is Step.COMPLETE:
            attempt.cancel()
            answer = delivery.complete_stream()
            assert answer is not None
            delivery.end()
            self.succeed(answer)
        elif step is Step.GO_ON and rescuer is not None:
            rescuer.go_on(others, message)
        elif step is Step.CLOSE and rescuer is not None:
            rescuer.close()
        else:
            if step is not Step.WAIT and delivery.has_begun and RULES[kind].goes_on and rescuer is not None:
                rescuer.note_lost()
            return False
        return True

    def backend_is_down(self, backend: Backend) -> None:
        """Handle that a backend is down, if this exchange waits there for the first byte."""
        attempt = self.attempt
        if attempt is None or attempt.call is None or attempt.upstream.backend is not backend:
            return
        if not self.delivery.has_begun or (self.rescuer is not None and self.rescuer.is_waiting):
            self.failed("down", backend.state_reason)

    def check_silence(self, now_s: float) -> None:
        """Handle that the backend has been silent for too long.

        It may be slow, so another one gets the request only if this one is down: else overload would double the load.
        """
        if now_s >= self.deadline_s:
            self.expire()
            return
        attempt, pool, timeouts = self.attempt, self.relay.pool, self.relay.timeouts
        if attempt is None or attempt.call is None or attempt.call.paused:
            return
        silent_s, backend = now_s - attempt.last_read_s, attempt.upstream.backend
        if silent_s > pool.rules.silence_s and backend.engine.metrics and not pool.watch(backend).is_progressing:
            pool.report_failure(backend)  # its probe will show whether it stands still
        is_answering = self.delivery.times.first_s and not (self.rescuer is not None and self.rescuer.is_waiting)
        if silent_s > STALL_S and is_answering and self._is_stalled(attempt, now_s):
            self.failed("stalled", f"sent nothing for {silent_s:.1f} s of a stream", may_fail=False)
            return
        limit_s = timeouts.idle_s if is_answering else timeouts.first_byte_s
        is_down = backend.state is State.DOWN
        if is_down:
            limit_s = min(limit_s, _DOWN_TIMEOUT_S)
        is_over = False
        if attempt.is_on_trial and silent_s > _DOWN_TIMEOUT_S + pool.rules.interval_s:
            is_stuck = not pool.watch(backend).is_progressing
            is_over = is_stuck and self.failed("trial", f"sent nothing for {silent_s:.0f} s", may_fail=False)
        if not is_over and silent_s > limit_s:
            is_over = is_down and self.failed("down", backend.state_reason, may_fail=False)
            if not is_over:
                self.failed("timeout", f"sent nothing for {limit_s:g} s")

    def _is_stalled(self, attempt: Attempt, now_s: float) -> bool:
        """Return whether a silent stream could go on elsewhere, and its backend is not silent for all."""
        rescuer, answer, times = self.rescuer, self.delivery.answer, self.delivery.times
        if rescuer is None or rescuer.outlook() is Outlook.NONE or answer is None or answer.events is None:
            return False
        upstream, gap_s = attempt.upstream, (attempt.last_read_s - times.first_s) / max(1, answer.events.events)
        is_alone = upstream.backend.in_flight == 1
        return now_s - attempt.last_read_s > STALL_GAPS * gap_s and (
            is_alone or now_s - upstream.backend.read_s < _ALIVE_S
        )

    def expire(self) -> None:
        """Fail since the request's time is over, which is no evidence against a backend."""
        self.timer = None
        if self not in self.relay.exchanges:
            return  # it has ended in the same sweep
        if self.place is not None and self.queue is not None:
            self.queue.refused["deadline"] += 1
        self.end_with_error(exceeded(min(self.inbound.request_headers.timeout_s, self.relay.timeouts.total_s)))

    # The end

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error: as the answer, as an event of a stream that has begun, else by closing the connection."""
        delivery, has_begun = self.delivery, self.delivery.has_begun
        if self.attempt is not None:
            self.attempt.cancel()
        if (answer := delivery.complete_stream()) is not None:
            delivery.end()
            self.succeed(answer)
        elif has_begun:
            delivery.interrupt(error)
            self._finish(error.status, "interrupted")
        else:
            delivery.answer_with(error, self.attempt)
            self._finish(error.status, "unanswered", is_over=error.code == EXCEEDED)

    def defect(self) -> GatewayError:
        """Log a defect of the gateway with its traceback, and return the error for it."""
        model = "" if self.routed is None else self.routed.model.name
        fields = {"request_id": self.delivery.request_id.decode("latin-1"), "model": model}
        log.exception("a request could not be sent on", extra={"fields": fields})
        return gateway_failed()

    def note_served(self, backend: Backend | None) -> None:
        """Report that the request is being served, by a backend if that is evidence for it."""
        pool = self.relay.pool
        if backend is not None:
            pool.report_success(backend)
        for suspect, message in self._suspects:
            pool.report(suspect, Strike(self.inbound.fingerprint(), message))
        self._suspects.clear()

    def succeed(self, answer: PassThrough) -> None:
        """End with an answer that was passed on."""
        attempt, delivery = self.attempt, self.delivery
        assert attempt is not None
        backend = attempt.upstream.backend
        attempt.release()
        delivery.answer = answer
        label = delivery.label()
        if label == "ok" and delivery.endpoint is not _OTHER and delivery.status < 300:
            self.relay.pool.report_success(backend)
            if self._suspects:
                self.note_served(None)
            if answer.events is not None:
                attempt.learn_habits(answer.events)
        elif answer.error_status >= 500 and answer.error_status != OVERLOADED and not self._was_suspected:
            self.relay.pool.report(backend, Strike(self.inbound.fingerprint(), "ended a stream with an error"))
        self._finish(delivery.status, label)

    def _finish(self, status: int, label: str, *, is_over: bool = False) -> None:
        """Conclude the exchange, which gives up its place in the queue; `is_over` if its time was."""
        self.relay.exchanges.discard(self)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        output_tokens = conclude(self, status, label, is_over=is_over)
        self.attempt = self.rescuer = None  # which refer to the exchange: nothing is left for the garbage collector
        if self.queue is not None:
            if self.charge is not None:
                self.charge.party.settle(self.charge.price, output_tokens)
            if self.place is not None:
                self.queue.leave(self.place)
                self.place = None
            self.queue.dispatch()
