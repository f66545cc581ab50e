"""The exchange: one request from the choice of its backend to its end.

It decides which backend gets the request, and carries out what follows from a failure (`gateway.relay.failures`). There
is one for each request that was routed, with one `Delivery`, which alone writes to the client; and an `Attempt` for
each backend that gets the request, of which a retry or a rescue makes a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from backends.backend import Backend
from backends.health import State, Strike, Unreachable
from gateway.dialects.errors import EXCEEDED, GatewayError, exceeded, gateway_failed
from gateway.relay.accounting import conclude
from gateway.relay.answers import PassThrough
from gateway.relay.attempt import OVERLOADED, Attempt
from gateway.relay.context import RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.failures import (
    RULES,
    Blame,
    Notice,
    Outlook,
    Situation,
    Step,
    Verdict,
    backend_failed,
    verdict_on,
)
from gateway.relay.observers import EndedExchange, Traced, tell, tell_send
from gateway.relay.queue import ModelQueue, Place
from gateway.relay.roles import Rescuer, Sender, Silence
from gateway.relay.shares import Charge, price_of
from gateway.routing.contexts import longer
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from policies.arm import arm_of
from policies.features.request import Endpoint
from policies.policy import Decision
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
        self.rescuer = rescuer  # has another backend go on with the stream; None if nothing does, and at the end
        self.queue = queue  # that of the model; None without one
        # The id of the request for engines, which may refuse an id that another request has: a client's own stands at
        # its end, after random digits.
        own = request.request_id
        self.engine_id = b"%b-%b" % (relay.new_request_id()[:16], own) if own else request_id
        self.attempt: Attempt | None = None  # the present attempt; None before the first, and at the end
        self.place: Place | None = None  # in the queue, while the request waits; None otherwise
        self._traced = traced  # by whose account the gateway takes part in the trace; None if it does not
        self._closed = closed  # names of backends that have no room for it
        self.is_open = True  # whether it has not ended yet
        self._price: Price | None = None  # what it is expected to cost, once that is asked
        self._charge: Charge | None = None  # what its client was charged in the queue's shares
        # Backends that have failed the request, and how: strikes, once another one has served it.
        self._suspects: tuple[tuple[Backend, str], ...] = ()
        self._was_suspected = False  # whether there was one, also if it has got its strike
        self.timer: asyncio.TimerHandle | None = None  # for a deadline that the request sets itself
        self._deadline_s = math.inf  # by `time.perf_counter`
        if request.timeout_s < relay.timeouts.total_s:
            self.timer = asyncio.get_running_loop().call_later(request.timeout_s, self.expire)
        else:
            self._deadline_s = delivery.arrived_s + relay.timeouts.total_s  # checked by `check_silence`

    # What others know of it: `gateway.relay.roles.Ongoing`

    @property
    def lines(self) -> bytes:
        """Header lines for the next backend: those of the client, unless the gateway takes part in its trace."""
        return self.request.lines if self._traced is None else self._traced.lines

    def sent_to(self) -> str:
        """Return the name of the backend that has the request; empty while none has."""
        return "" if self.attempt is None else self.attempt.decision.backend

    def age_s(self, now_s: float) -> float:
        """Return how long ago the request had arrived."""
        return now_s - self.delivery.arrived_s

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
            self.attempt.pause()

    def resume(self) -> None:
        """Resume reading the answer."""
        self.delivery.pause(is_paused=False)
        if self.attempt is not None:
            self.attempt.resume()

    # Attempts

    def price(self) -> Price:
        """Return what the request was expected to cost when it came."""
        if self._price is None:
            self._price = price_of(self.routed)
        return self._price

    def members(self) -> Sequence[Backend]:
        """Return the backends that can serve the request, whatever their state."""
        return self.relay.router.members(self.routed)

    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends that the request may be sent to, without those tried."""
        may_try = may_try and not (tried or self.delivery.endpoint is _OTHER or self.routed.headers.backend)
        return self.sender.candidates(self.relay.router, self.routed, tried + self._closed, may_try=may_try)

    def close_to(self, backends: tuple[str, ...]) -> None:
        """Send the request to none of some backends."""
        self._closed = backends

    def begin(self, rank: int) -> None:
        """Send the request, or have it wait for its turn."""
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
        """Send the request after a wait, or say why it cannot be sent."""
        delivery, self._charge = self.delivery, charge
        delivery.wait(waited_s)
        if self.place is not None:
            self.place = None
            self.relay.metrics.queue_wait.labels(self.routed.model.name).observe(waited_s)
        try:
            self.send(self.candidates(()) if candidates is None else candidates)
        except GatewayError as error:
            self.end_with_error(error)
        except Exception:  # noqa: BLE001 -- a defect of the gateway, which must be answered too
            self.end_with_error(defect(delivery.request_id, self.routed.model.name))

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
        decision = relay.router.choose(routed, candidates)
        if reason:
            decision = replace(decision, reason=reason)
        tell_send(self.delivery.observers, decision, candidates)  # before the load of the backend changes
        attempt = self.attempt = Attempt(self, self.delivery, routed.model.upstreams[decision.backend], decision)
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        return attempt

    def served_by(self, upstream: Upstream, decision: Decision) -> None:
        """Handle that a proxy has sent the request to another backend, since it could not reach the one chosen."""
        first = self.attempt
        if first is None:
            return
        first.release()
        self.relay.pool.report_failure(first.upstream.backend)
        self.relay.metrics.retries.labels(*first.upstream.metrics.labels, "proxy").inc()
        self.delivery.retry_from(first.upstream.backend.name)
        tell_send(self.delivery.observers, decision, [upstream.backend])
        self.attempt = Attempt(self, self.delivery, upstream, decision)
        self.attempt.is_sent()

    # Failures

    def failed(
        self, attempt: Attempt, kind: str, message: str, *, is_proof: bool = False, otherwise: Step | None = None
    ) -> Step:
        """Do what follows from a failure of a backend, by `gateway.relay.failures`, and return it.

        `message` is what the backend did, or nothing if that is never evidence. `ENGINE_ERROR`, `WAIT` and `TIME_OUT`
        are done by the caller; so is `otherwise`, in place of an error of the gateway.
        """
        delivery, rescuer, backend = self.delivery, self.rescuer, attempt.upstream.backend
        tried = (backend.name, delivery.retried_from, *([] if rescuer is None else rescuer.left))
        try:
            others = self.candidates(tried)
        except GatewayError:
            others = []
        if kind == "length":
            others = longer(others, backend)
        elif kind in _MAY_BE_METHOD:
            arm = arm_of(backend)
            others = [other for other in others if arm_of(other) != arm] or others
        situation = Situation(
            delivery.has(),
            was_retried=bool(delivery.retried_from) and delivery.retried_from not in self._closed,
            may_move=self.sender.is_relayed and not self.routed.headers.backend,
            may_repeat=self.request.may_repeat,
            has_other=bool(others),
            has_budget=self.routed.model.retry_budget.has_one(time.monotonic()),
            is_on_trial=attempt.is_on_trial,
            outlook=Outlook.NONE if rescuer is None else rescuer.outlook(),
            is_proof=is_proof and delivery.endpoint is not _OTHER,
            is_first_suspect=not self._was_suspected,
        )
        verdict = verdict_on(kind, situation)
        if verdict.step is Step.FAIL and otherwise is not None:
            verdict = replace(verdict, step=otherwise)
        if verdict.blame is Blame.IF_SERVED and message:
            self._suspects += ((backend, message),)
            self._was_suspected = True
        self._carry_out(verdict, attempt, kind, message, others)
        self._report(verdict, backend, kind, message)
        return verdict.step

    def _carry_out(self, verdict: Verdict, attempt: Attempt, kind: str, message: str, others: list[Backend]) -> None:
        delivery, rescuer, step, rule = self.delivery, self.rescuer, verdict.step, RULES[kind]
        if verdict.lacks_budget:
            self.relay.metrics.retries_refused.labels(self.routed.model.name).inc()
        if step is Step.RETRY:
            self._retry(attempt, kind, others)
        elif step is Step.COMPLETE:
            self.complete(attempt)
        elif step is Step.GO_ON and rescuer is not None:
            rescuer.go_on(attempt, others, message)
        elif step is Step.CLOSE and rescuer is not None:
            rescuer.close(attempt)
        elif step is not Step.WAIT and delivery.has_begun and rule.goes_on and rescuer is not None and not rescuer.left:
            self.relay.metrics.rescues.labels(*attempt.upstream.metrics.labels, "impossible").inc()
        if step is Step.FAIL:
            name, may_repeat = attempt.upstream.backend.name, self.request.may_repeat
            error = backend_failed(name, kind, message, has_begun=delivery.has_begun, may_repeat=may_repeat)
            self.end_with_error(error)

    def _retry(self, attempt: Attempt, kind: str, others: list[Backend]) -> None:
        delivery, rule, name = self.delivery, RULES[kind], attempt.upstream.backend.name
        if not (rule.is_free or attempt.is_on_trial):
            self.routed.model.retry_budget.take()
        attempt.cancel()
        if rule.is_full:
            self._closed += (name,)
        if not (rule.is_full and delivery.retried_from):
            delivery.retry_from(name)
        self.relay.metrics.retries.labels(*attempt.upstream.metrics.labels, kind).inc()
        tell(delivery.observers, lambda observer: observer.on_retry(kind))
        self.send(others if self.queue is None else self.queue.free(others) or others)
        if self.queue is not None:
            self.queue.dispatch()

    def _report(self, verdict: Verdict, backend: Backend, kind: str, message: str) -> None:
        """Tell the pool what has happened."""
        pool, report = self.relay.pool, RULES[kind].report
        if verdict.blame is Blame.NOW:
            pool.report(backend, Strike(self.fingerprint(), message))
        if verdict.step is Step.COMPLETE:
            return
        if report is Notice.UNREACHABLE:
            pool.report(backend, Unreachable(message))
        elif report is Notice.TIMEOUT and self.delivery.endpoint is not _OTHER:
            pool.report_timeout(backend, self.fingerprint(), message)
        elif report is not Notice.NOTHING:
            pool.report_failure(backend)

    def fingerprint(self) -> int:
        """Return a number by which the pool recognizes the request if it is sent again."""
        return hash((self.request.target, self.body))

    def backend_is_down(self, backend: Backend) -> None:
        """Handle that a backend is down, if this exchange waits there for the first byte."""
        attempt = self.attempt
        if attempt is None or attempt.call is None or attempt.upstream.backend is not backend:
            return
        is_waiting = not self.delivery.has_begun or (self.rescuer is not None and self.rescuer.is_waiting)
        if is_waiting and self.sender.is_relayed:  # else it is for the proxy to send it elsewhere
            self.failed(attempt, "down", backend.health.reason)

    def silence_of(self, backend: Backend, now_s: float) -> Silence | None:
        """Return for how long a backend has told nothing of this request; None if nothing is waited for there."""
        attempt, delivery = self.attempt, self.delivery
        if attempt is None or attempt.upstream.backend is not backend or delivery.endpoint is _OTHER:
            return None
        if attempt.call is None or attempt.call.paused:
            return None
        prompt_tokens = 0 if delivery.first_s else self.routed.features.prompt_tokens
        return Silence(now_s - attempt.last_read_s, prompt_tokens)

    def check_silence(self, now_s: float) -> None:
        """Handle that the backend has been silent for too long.

        It may be slow, so another one gets the request only if this one is down: else overload would double the load.
        """
        if now_s >= self._deadline_s:
            self.expire()
            return
        attempt, pool, timeouts = self.attempt, self.relay.pool, self.relay.timeouts
        if attempt is None or attempt.call is None or attempt.call.paused:
            return
        silent_s, backend = now_s - attempt.last_read_s, attempt.upstream.backend
        if silent_s > pool.rules.silence_s and backend.engine.metrics and not pool.watch(backend).is_progressing:
            pool.report_failure(backend)  # its probe will show whether it stands still
        is_answering = self.delivery.first_s and not (self.rescuer is not None and self.rescuer.is_waiting)
        if silent_s > STALL_S and is_answering and self._is_stalled(attempt, now_s):
            self.failed(attempt, "stalled", f"sent nothing for {silent_s:.1f} s of a stream")
            return
        limit_s = timeouts.idle_s if is_answering else timeouts.first_byte_s
        is_down = backend.health.state is State.DOWN
        if is_down:
            limit_s = min(limit_s, _DOWN_TIMEOUT_S)
        step = Step.WAIT
        is_late = attempt.is_on_trial and silent_s > _DOWN_TIMEOUT_S + pool.rules.interval_s
        if is_late and not pool.watch(backend).is_progressing:
            step = self.failed(attempt, "trial", f"sent nothing for {silent_s:.0f} s")
        if step is Step.WAIT and silent_s > limit_s:
            step = Step.TIME_OUT
            if is_down:
                step = self.failed(attempt, "down", backend.health.reason, otherwise=step)
            if step is Step.TIME_OUT:
                self.failed(attempt, "timeout", f"sent nothing for {limit_s:g} s")

    def _is_stalled(self, attempt: Attempt, now_s: float) -> bool:
        """Return whether a silent stream could go on elsewhere, and its backend is not silent for all."""
        rescuer, delivery, upstream = self.rescuer, self.delivery, attempt.upstream
        answer = delivery.answer
        if rescuer is None or rescuer.outlook() is Outlook.NONE or answer is None or answer.events is None:
            return False
        gap_s = (attempt.last_read_s - delivery.first_s) / max(1, answer.events.events)
        is_alone = upstream.backend.in_flight == 1
        return now_s - attempt.last_read_s > STALL_GAPS * gap_s and (
            is_alone or now_s - upstream.backend.read_s < _ALIVE_S
        )

    def expire(self) -> None:
        """Fail since the request's time is over, which is no evidence against a backend."""
        self.timer = None
        if not self.is_open:
            return  # it has ended in the same sweep
        if self.place is not None and self.queue is not None:
            self.queue.count_deadline()
        self.end_with_error(exceeded(min(self.request.timeout_s, self.relay.timeouts.total_s)))

    # The end

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error: as the answer, as an event of a stream that has begun, else by closing the connection."""
        delivery, attempt, has_begun = self.delivery, self.attempt, self.delivery.has_begun
        error = self.sender.shown(error)
        if attempt is not None:
            if delivery.answer is not None and self.sender.goes_on(error):
                self.succeed(attempt, delivery.answer)
                return
            attempt.cancel()
        if attempt is not None and delivery.complete_stream() is not None:
            self.complete(attempt)
        elif has_begun:
            delivery.interrupt(error)
            self._finish(error.status, "interrupted")
        else:
            choice_lines = b"" if attempt is None else attempt.lines_of_choice()
            delivery.answer_with(error, choice_lines)
            self._finish(error.status, "unanswered", is_over=error.code == EXCEEDED)
        if has_begun:
            self.sender.cut_off()

    def complete(self, attempt: Attempt) -> None:
        """End a stream whose last event was passed on."""
        attempt.cancel()
        answer = self.delivery.complete_stream()
        self.delivery.end()
        if answer is not None:
            self.succeed(attempt, answer)

    def note_served(self, backend: Backend | None) -> None:
        """Report that the request is being served, by a backend if that is evidence for it."""
        pool = self.relay.pool
        if backend is not None:
            pool.report_success(backend)
        for suspect, message in self._suspects:
            pool.report(suspect, Strike(self.fingerprint(), message))
        self._suspects = ()

    def succeed(self, attempt: Attempt, answer: PassThrough) -> None:
        """End with an answer that was passed on."""
        delivery, backend = self.delivery, attempt.upstream.backend
        attempt.release()
        label = delivery.label()
        if label == "ok" and delivery.endpoint is not _OTHER and delivery.status < 300:
            self.relay.pool.report_success(backend)
            if self._suspects:
                self.note_served(None)
            if answer.events is not None:
                attempt.learn_habits(answer.events)
        elif answer.error_status >= 500 and answer.error_status != OVERLOADED and not self._was_suspected:
            self.relay.pool.report(backend, Strike(self.fingerprint(), "ended a stream with an error"))
        self._finish(delivery.status, label)

    def _finish(self, status: int, label: str, *, is_over: bool = False) -> None:
        """End in guarded steps, whatever one of them raises; `is_over` if the request's time was."""
        relay, queue, delivery = self.relay, self.queue, self.delivery
        self.is_open = False
        relay.exchanges.discard(self)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        ended = self._ended(status, label)
        # They refer to the exchange: nothing is left for the garbage collector.
        self.attempt = self.rescuer = None
        conclude(ended, relay, delivery, self.body, is_over=is_over)
        if queue is not None:
            if self._charge is not None:
                self._charge.party.settle(self._charge.price, ended.answer_tokens)
            if self.place is not None:
                queue.leave(self.place)
                self.place = None
            queue.dispatch()

    def _ended(self, status: int, label: str) -> EndedExchange:
        """Return what the exchange was."""
        delivery, attempt = self.delivery, self.attempt
        answer = delivery.answer
        rescued = None if self.rescuer is None else self.rescuer.rescued()
        usage = None if answer is None else answer.usage
        return EndedExchange(
            delivery.request_id,
            self.request.client,
            self.routed,
            None if attempt is None else attempt.decision,
            None if attempt is None else attempt.upstream,
            delivery.retried_from,
            status,
            label,
            delivery.arrived_s,
            delivery.first_s,
            delivery.last_s,
            time.perf_counter(),
            delivery.waited_s,
            rescued.usage if usage is None and rescued is not None else usage,
            None if answer is None else answer.events,
            unread_bytes=0 if answer is None else answer.unread_bytes,
            was_paused=delivery.was_paused,
            rescued_from="" if rescued is None else rescued.backend,
            rescued_at=0 if rescued is None else rescued.tokens,
        )


def defect(request_id: bytes, model: str) -> GatewayError:
    """Log a defect of the gateway with its traceback, and return the error for it."""
    fields = {"request_id": request_id.decode("latin-1"), "model": model}
    log.exception("a request could not be sent on", extra={"fields": fields})
    return gateway_failed()
