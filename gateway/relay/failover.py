"""Handles the failures of one request, by the rules of `gateway.relay.failures`."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from dataclasses import replace
from typing import Final

from backends.backend import Backend
from backends.health import Strike, Unreachable
from gateway.dialects.errors import GatewayError, gateway_failed
from gateway.relay.attempt import Attempt, Tried
from gateway.relay.delivery import Delivery
from gateway.relay.failures import (
    RULES,
    Blame,
    Failure,
    Notice,
    Outlook,
    Situation,
    Step,
    Verdict,
    backend_failed,
    verdict_on,
)
from gateway.relay.observers import tell
from gateway.relay.waiting.queue import ModelQueue
from gateway.routing.contexts import longer
from policies.arm import arm_of
from policies.features.request import Endpoint

log = logging.getLogger(__name__)

_OTHER: Final = Endpoint.OTHER
_MAY_BE_METHOD: Final = frozenset({"status", "error", "garbage"})
"""Failures that may be due to how a backend speculates: the retry prefers one that speculates differently."""


class Failing(Tried):
    """The exchange as its failover sees it."""

    delivery: Delivery
    queue: ModelQueue | None
    closed: tuple[str, ...]  # names of backends that have no room for it
    is_open: bool  # False once it has ended

    @abstractmethod
    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends to which the request may be sent, without those tried; raise if there is none."""

    @abstractmethod
    def close_to(self, backends: tuple[str, ...]) -> None:
        """Exclude backends from those that may get the request."""

    @abstractmethod
    def send(self, candidates: list[Backend]) -> None:
        """Send the request to one of the candidates."""


def fingerprint(exchange: Failing) -> int:
    """Return a number by which the pool recognizes a request that is sent again."""
    return hash((exchange.request.target, exchange.body))


def answerable(error: Exception, request_id: bytes, model: str) -> GatewayError:
    """Return the error for a client; for a defect of the gateway too, which is logged with its traceback."""
    if isinstance(error, GatewayError):
        return error
    fields = {"request_id": request_id.decode("latin-1"), "model": model}
    log.exception("a request could not be sent on", extra={"fields": fields})
    return gateway_failed()


class Failover:
    """Handles the failures of one request; created at the first one."""

    def __init__(self, exchange: Failing) -> None:
        self._exchange = exchange
        # Backends that failed the request, how and when: strikes, once another one serves it.
        self._suspects: tuple[tuple[Backend, str, float], ...] = ()
        self.was_suspected = False  # whether there was a suspect, even if its strike is reported

    def handle(self, attempt: Attempt, failure: Failure) -> Step:
        """Carry out the step that follows from a failure, and return it.

        The caller does `ENGINE_ERROR`, `WAIT`, `TIME_OUT`, and the failure's `otherwise` in place of an error.
        """
        backend, kind = attempt.upstream.backend, failure.kind
        try:
            others = self._others(backend, kind)
            verdict = verdict_on(kind, self._situation(attempt, failure, has_other=bool(others)))
            if verdict.step is Step.FAIL and failure.otherwise is not None:
                verdict = replace(verdict, step=failure.otherwise)
            if verdict.blame is Blame.IF_SERVED and failure.message:
                self._suspects += ((backend, failure.message, time.monotonic()),)
                self.was_suspected = True
            self._carry_out(verdict, attempt, failure, others)
        except Exception as error:
            if not self._exchange.is_open:
                raise
            delivery, model = self._exchange.delivery, self._exchange.routed.model.name
            self._exchange.end_with_error(answerable(error, delivery.request_id, model))
            return Step.FAIL
        self._report(verdict, attempt, failure)
        return verdict.step

    def served(self) -> None:
        """Report the backends that failed the request, since another one serves it."""
        exchange = self._exchange
        for suspect, message, at_s in self._suspects:
            exchange.relay.pool.report(suspect, Strike(fingerprint(exchange), message, at_s))
        self._suspects = ()

    def _others(self, backend: Backend, kind: str) -> list[Backend]:
        """Return the backends that may serve the request in place of one that failed it."""
        exchange = self._exchange
        left = [] if exchange.rescuer is None else exchange.rescuer.left
        try:
            others = exchange.candidates((backend.name, exchange.delivery.retried_from, *left))
        except GatewayError:
            return []
        if kind == "length":
            return longer(others, backend)
        if kind in _MAY_BE_METHOD:
            arm = arm_of(backend)
            return [other for other in others if arm_of(other) != arm] or others
        return others

    def _situation(self, attempt: Attempt, failure: Failure, *, has_other: bool) -> Situation:
        exchange, delivery, rescuer = self._exchange, self._exchange.delivery, self._exchange.rescuer
        return Situation(
            delivery.has(),
            was_retried=bool(delivery.retried_from) and delivery.retried_from not in exchange.closed,
            may_move=exchange.sender.is_relayed and not exchange.routed.headers.backend,
            may_repeat=exchange.request.may_repeat,
            has_other=has_other,
            has_budget=exchange.routed.model.retry_budget.has_one(time.monotonic()),
            is_on_trial=attempt.is_on_trial,
            outlook=Outlook.NONE if rescuer is None else rescuer.outlook(),
            is_proof=failure.is_proof and delivery.endpoint is not _OTHER,
            is_first_suspect=not self.was_suspected,
        )

    def _carry_out(self, verdict: Verdict, attempt: Attempt, failure: Failure, others: list[Backend]) -> None:
        exchange, step, rule = self._exchange, verdict.step, RULES[failure.kind]
        delivery, rescuer, metrics = exchange.delivery, exchange.rescuer, exchange.relay.metrics
        if verdict.lacks_budget:
            metrics.retries_refused.labels(exchange.routed.model.name).inc()
        if step is Step.RETRY:
            self._retry(attempt, failure.kind, others)
        elif step is Step.COMPLETE:
            attempt.complete()
        elif step is Step.GO_ON and rescuer is not None:
            rescuer.go_on(attempt, others, failure.message)
        elif step is Step.CLOSE and rescuer is not None:
            rescuer.close(attempt)
        elif step is not Step.WAIT and delivery.has_begun and rule.goes_on and rescuer is not None and not rescuer.left:
            metrics.rescues.labels(*attempt.upstream.metrics.labels, "impossible").inc()
        if step is Step.FAIL:
            name, may_repeat = attempt.upstream.backend.name, exchange.request.may_repeat
            error = backend_failed(
                name, failure.kind, failure.message, has_begun=delivery.has_begun, may_repeat=may_repeat
            )
            exchange.end_with_error(error)

    def _retry(self, attempt: Attempt, kind: str, others: list[Backend]) -> None:
        exchange, rule, name = self._exchange, RULES[kind], attempt.upstream.backend.name
        delivery, queue = exchange.delivery, exchange.queue
        if not (rule.is_free or attempt.is_on_trial):
            exchange.routed.model.retry_budget.take()
        attempt.cancel()
        if rule.is_full:
            exchange.close_to((*exchange.closed, name))
        if not (rule.is_full and delivery.retried_from):
            delivery.retry_from(name)
        exchange.relay.metrics.retries.labels(*attempt.upstream.metrics.labels, kind).inc()
        tell(delivery.observers, lambda observer: observer.on_retry(kind))
        exchange.send(others if queue is None else queue.free(others) or others)
        if queue is not None:
            queue.dispatch()

    def _report(self, verdict: Verdict, attempt: Attempt, failure: Failure) -> None:
        """Report the failure to the pool, by the verdict and the rule for its kind."""
        backend = attempt.upstream.backend
        exchange, pool, report = self._exchange, self._exchange.relay.pool, RULES[failure.kind].report
        if verdict.blame is Blame.NOW:
            pool.report(backend, Strike(fingerprint(exchange), failure.message))
        if verdict.step is Step.COMPLETE:
            return
        if report is Notice.UNREACHABLE:
            pool.report(backend, Unreachable(failure.message))
        elif report is Notice.TIMEOUT and exchange.delivery.endpoint is not _OTHER:
            silent_s = time.perf_counter() - attempt.last_read_s
            pool.report_timeout(backend, fingerprint(exchange), failure.message, silent_s)
        elif report is not Notice.NOTHING:
            pool.report_failure(backend)
