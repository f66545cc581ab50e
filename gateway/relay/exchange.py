"""The exchange: sends a request to a backend, if need be to another one, and passes the answer on to the client.

How much of an answer is held back before it is passed on is up to `gateway.relay.answers`. While nothing has been
passed on, the request can be retried, once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import replace
from typing import Final

from backends.backend import Backend, State
from backends.http.client import AnswerHead, Call, HeaderList, UpstreamError
from backends.recovery import TRIAL
from gateway.http.deadline import exceeded
from gateway.http.errors import GatewayError, endpoint_of, request_id_lines
from gateway.http.headers import relative_location, upstream_head
from gateway.http.sse import engine_error
from gateway.relay.accounting import account, charge, count
from gateway.relay.answers import InvalidAnswerError, PassThrough, WholeAnswer, answer_for
from gateway.relay.context import Inbound, RelayContext, Reply, send_error
from gateway.relay.observers import EndedExchange, LocationObserver, Observer, Times
from gateway.relay.priority import rank_of
from gateway.relay.queue import ModelQueue, Place
from gateway.relay.rescue import Rescue, rescue_for
from gateway.relay.rescue.attempt import Failure
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from policies.features.request import Endpoint
from policies.policy import Decision

log = logging.getLogger(__name__)

_OTHER: Final = Endpoint.OTHER
_RETRYABLE: Final = frozenset({500, 502, 503})  # not 504: a server between says that the engine is slow
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})  # sent with a content length even if the body is empty
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_STATUSES: Final = {"timeout": 504, "connect": 503, "down": 503, "exhausted": 503}
_OVERLOADED: Final = 503  # an engine that says so, and is at work, is not at fault
_ADVICE: Final = {
    **dict.fromkeys(("connect", "down", "exhausted", "broken"), " Send the request again."),
    "timeout": " It may be busy: have the answer streamed, or ask for less.",
}
_FREE_RETRIES: Final = frozenset({"connect", "down", "trial"})  # the first replica does no work for them any more
_DOWN_TIMEOUT_S: Final = 5.0  # of an exchange whose backend fails its health checks


def _gateway_failed() -> GatewayError:
    return GatewayError(500, "The gateway failed; see its log.", code="gateway_failed")


class _Failure:
    """The failure of a first attempt.

    Parameters
    ----------
    kind
        The label value in metrics.
    message
        What the backend did, if it is evidence against the backend once another one serves the request; else empty.
    """

    __slots__ = ("backend", "kind", "message")

    def __init__(self, backend: Backend, kind: str, message: str) -> None:
        self.backend = backend
        self.kind = kind
        self.message = message


class _Place:
    """The backend of a stream that is being moved away, which may still go on with it; its call is paused."""

    __slots__ = ("call", "decision", "upstream")

    def __init__(self, call: Call, upstream: Upstream, decision: Decision | None) -> None:
        self.call = call
        self.upstream = upstream
        self.decision = decision


class Exchange:
    """One request from arrival to outcome; the receiver of its upstream call."""

    __slots__ = (
        "_answer",
        "_call",
        "_deadline_s",
        "_decision",
        "_has_no_retry",
        "_head_sent",
        "_headers",
        "_inbound",
        "_last_read_s",
        "_left",
        "_observers",
        "_place",
        "_queue",
        "_relay",
        "_reply",
        "_request_id",
        "_rescue",
        "_retried",
        "_routed",
        "_status",
        "_timer",
        "_times",
        "_upstream",
        "_was_paused",
        "endpoint",
    )

    def __init__(self, relay: RelayContext, inbound: Inbound, reply: Reply) -> None:
        self._relay = relay
        self._inbound = inbound
        self._reply = reply
        self._request_id = inbound.request_headers.request_id or relay.new_request_id()
        self.endpoint = endpoint_of(inbound.path, inbound.request_headers.method)
        self._observers: list[Observer] = []
        self._routed: RoutedRequest | None = None
        self._decision: Decision | None = None
        self._upstream: Upstream | None = None
        self._call: Call | None = None
        self._retried: _Failure | None = None
        self._rescue: Rescue | None = None
        self._left: _Place | None = None
        self._times = Times(inbound.arrived_s)
        self._last_read_s = inbound.arrived_s
        self._status = 0
        self._headers: HeaderList = []
        self._answer: PassThrough | None = None
        self._head_sent = False
        self._was_paused = False
        self._has_no_retry = False
        self._deadline_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._queue: ModelQueue | None = None
        self._place: Place | None = None

    # Called by the frontend

    def begin(self) -> None:
        """Route the request and send it to a backend, or answer with an error."""
        relay = self._relay
        try:
            self._admit()
        except Exception as error:
            if not isinstance(error, GatewayError):  # a defect: caught here so that both frontends answer alike
                log.exception("a request could not be sent on")
                error = _gateway_failed()
            if self in relay.exchanges:
                self.end_with_error(error)
            else:
                relay.metrics.count_refusal()
                self._answer_with(error)

    def _admit(self) -> None:
        """Check limits before anything is parsed; then route, and send."""
        relay, inbound, headers = self._relay, self._inbound, self._inbound.request_headers
        now_s = time.monotonic()
        relay.limits.enter(headers.client)
        try:
            routed = relay.router.route(
                inbound.path, headers.method, inbound.body, headers.client, headers.routing_headers, now_s
            )
        except BaseException:
            relay.limits.leave(headers.client, 0)
            raise
        self._routed = routed
        if routed.model.rescue and not headers.routing_headers.backend:
            self._rescue = rescue_for(self.endpoint, inbound.target, inbound.body)
        routed.model.traffic.arrive(now_s)
        routed.model.traffic.in_flight += 1
        relay.exchanges.add(self)
        if headers.timeout_s < relay.timeouts.total_s:
            self._timer = relay.call_later(headers.timeout_s, self._expire)
        elif relay.timeouts.total_s < math.inf:
            self._deadline_s = inbound.arrived_s + relay.timeouts.total_s  # checked by `check_silence`
        if self.endpoint is not _OTHER or (headers.method == "POST" and inbound.body):
            if relay.queues:
                self._queue = relay.queues.get(routed.model.name)
            for follower in relay.followers.get(routed.model.name, ()):
                if (observer := follower.follow(routed, inbound.body)) is not None:
                    self._observers.append(observer)
            if self.endpoint is Endpoint.RESPONSES:
                self._observers.append(LocationObserver(relay.router.locations))
        if self._queue is None:
            self._send(self._candidates(()))
        else:
            self._send_or_wait(self._queue)

    def _send_or_wait(self, queue: ModelQueue) -> None:
        """Send the request if a backend has few enough; else wait for one."""
        relay, inbound, headers, routed = self._relay, self._inbound, self._inbound.request_headers, self._routed
        assert routed is not None
        rank = rank_of(headers.client.priority, routed.priority)
        if self.endpoint is not _OTHER:
            inbound.body = queue.body_for_engine(inbound.body, routed.priority, rank)
        if free := self.free_candidates():
            self._send(free)
            return
        members = relay.router.members(routed, headers.client, headers.routing_headers)
        self._place = queue.enter(self, members, rank, len(inbound.body))

    def free_candidates(self) -> list[Backend]:
        """Return the backends that the request may be sent to now, and that have few enough."""
        queue = self._queue
        assert queue is not None
        try:
            free = queue.free(self._candidates(()))
            if not free and self._relay.pool.recovery.replicas:  # the one on trial may be full
                free = queue.free(self._candidates((), may_try=False))
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
            log.exception("a request could not be sent on")
            self.end_with_error(_gateway_failed())

    def client_gone(self) -> None:
        """Cancel the request, since its client has disconnected."""
        if self in self._relay.exchanges:
            self._cancel_call()
            if (answer := self._complete_stream()) is not None:
                self._succeed(answer)
            else:
                self._finish(499, "cancelled")

    def pause(self) -> None:
        """Pause reading the answer while the client is slow to receive it."""
        if self._call is not None:
            self._was_paused = True
            self._call.pause()

    def resume(self) -> None:
        """Resume reading the answer."""
        if self._call is not None:
            self._last_read_s = time.perf_counter()  # the pause does not count as silence of the backend
            self._call.resume()

    # Attempts

    def _candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        assert self._routed is not None
        headers = self._inbound.request_headers
        routing_headers = headers.routing_headers
        may_try = may_try and not (tried or self.endpoint is _OTHER or routing_headers.backend)
        return self._relay.router.candidates(self._routed, headers.client, routing_headers, tried, may_try=may_try)

    def _send(self, candidates: list[Backend]) -> None:
        relay, inbound, headers, routed = self._relay, self._inbound, self._inbound.request_headers, self._routed
        assert routed is not None
        decision = relay.router.choose(routed, candidates, headers.routing_headers)
        upstream = routed.model.upstreams[decision.backend]
        self._decision, self._upstream, self._answer = decision, upstream, None
        self._times.first_s = 0.0
        for observer in self._observers:
            observer.on_send(decision, candidates)
        body = inbound.body if self._rescue is None else self._rescue.request.body
        head = self._upstream_head(upstream, inbound.target, body)
        upstream.backend.in_flight += 1
        if decision.reason == TRIAL:
            relay.pool.recovery.begin_trial(upstream.backend)
        self._last_read_s = time.perf_counter()
        if self._retried is None:
            relay.metrics.overhead.labels(routed.model.name).observe(
                self._last_read_s - inbound.arrived_s - self._times.waited_s
            )
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        method, once = headers.method, not self._may_repeat()
        self._call = upstream.client.send(head, body, self, head_only=method == "HEAD", whole=self, once=once)

    def _upstream_head(self, upstream: Upstream, target: bytes, body: bytes) -> bytes:
        headers, api_key = self._inbound.request_headers, upstream.backend.api_key
        key_lines = b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode()
        return upstream_head(
            headers.method,
            target,
            authority=upstream.client.address.authority,
            lines=headers.lines,
            key_lines=headers.key_lines if api_key is None and self._relay.access.keyring.is_open else key_lines,
            request_id=self._request_id,
            body_bytes=len(body) if body or headers.method in _WITH_BODY else None,
        )

    def _release(self) -> None:
        """Release the backend at the end of the call."""
        if self._upstream is not None and self._call is not None:
            self._upstream.backend.in_flight -= 1
            if self._is_on_trial():
                self._relay.pool.recovery.end_trial(self._upstream.backend)
        self._call = None

    def _is_on_trial(self) -> bool:
        return self._decision is not None and self._decision.reason == TRIAL

    def _cancel_call(self) -> None:
        if self._left is not None:
            self._leave_place(self._left)
        if self._call is not None:
            self._call.cancel()
        self._release()

    def _may_repeat(self) -> bool:
        """Return whether the request may run twice: inference only costs time, other requests may have an effect."""
        return self.endpoint is not _OTHER or self._inbound.request_headers.method in _SAFE

    def _retry(self, kind: str, message: str = "") -> bool:
        """Send the request to another backend; return whether it was sent.

        It is not sent if part of the answer was passed on, if it was retried before, if it names its backend, or if it
        may already have had an effect.

        Parameters
        ----------
        message
            The evidence against the backend, see `_Failure`.
        """
        upstream, headers = self._upstream, self._inbound.request_headers
        assert upstream is not None
        if self._head_sent or self._retried is not None or headers.routing_headers.backend:
            return False
        if kind != "connect" and not self._may_repeat():
            return False
        try:
            candidates = self._candidates((upstream.backend.name,))
        except GatewayError:
            return False
        if kind not in _FREE_RETRIES and not self._is_on_trial() and not self._take_retry():
            return False
        self._retried = _Failure(upstream.backend, kind, message)
        self._cancel_call()
        self._relay.metrics.retries.labels(*upstream.metrics.labels, kind).inc()
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

    def _retry_status(self, status: int) -> bool:
        """Send the request to another backend after a 5xx of the engine; return whether it was sent."""
        assert self._upstream is not None
        pool, backend = self._relay.pool, self._upstream.backend
        pool.report_failure(backend)
        is_evidence = status != _OVERLOADED or not pool.is_at_work(backend)
        return self._retry("status", f"answered {status} to a request that another served" if is_evidence else "")

    def _retry_or_fail(self, kind: str, message: str, *, is_strike: bool = False) -> None:
        """Send the request to another backend if possible; else end with an error.

        Parameters
        ----------
        is_strike
            Whether the failure is evidence against the backend even if no other one can try. The failure of a second
            attempt is none: it is more likely that the request is at fault. Nor is one that only the retry budget kept
            from a second attempt: this could have shown that.
        """
        assert self._upstream is not None
        if kind == "exhausted":  # the gateway's own limit: no backend is at fault, and none can be reached
            self._fail(kind, message)
            return
        if self._end_if_complete():
            return
        pool, backend, first = self._relay.pool, self._upstream.backend, self._retried
        if kind == "connect":
            if not (self._retry(kind) or self._continue(message)):
                self._fail(kind, message)
            pool.report_unreachable(backend, message)
            return
        if not (self._retry(kind, message) or self._continue(message, is_strike=is_strike)):
            self._fail(kind, message)
            has_no_other = first is None or not first.message
            if is_strike and has_no_other and not self._has_no_retry and self.endpoint is not _OTHER:
                pool.report_strike(backend, self._request_hash(), message)
        pool.report_failure(backend)

    def _request_hash(self) -> int:
        return hash((self._inbound.target, self._inbound.body))

    def backend_is_down(self, backend: Backend) -> None:
        """Retry on another backend if this exchange waits for the first byte from `backend`."""
        if self._call is None or self._upstream is None or self._upstream.backend is not backend:
            return
        if self._head_sent and not self._waits_for_rescue():
            return
        if not (self._retry("down") or self._continue(backend.state_reason)):
            self._fail("down", backend.state_reason)

    def check_silence(self, now_s: float) -> None:
        """Fail if the backend has been silent for too long.

        It may be slow, so another one gets the request only if this one is down: else overload would double the load.
        """
        if now_s >= self._deadline_s:
            self._expire()
            return
        if self._place is not None:
            self._check_wait(now_s, self._place)
        if self._call is None or self._call.paused:
            return
        assert self._upstream is not None
        timeouts = self._relay.timeouts
        has_begun = self._times.first_s and not self._waits_for_rescue()
        limit_s = timeouts.idle_s if has_begun else timeouts.first_byte_s
        backend = self._upstream.backend
        is_down = backend.state is State.DOWN
        if is_down:
            limit_s = min(limit_s, _DOWN_TIMEOUT_S)
        silent_s = now_s - self._last_read_s
        if self._is_on_trial() and silent_s > _DOWN_TIMEOUT_S and self._end_trial_in_silence(backend, silent_s):
            return
        if silent_s <= limit_s:
            return
        if self._end_if_complete() or (is_down and (self._retry("down") or self._continue(backend.state_reason))):
            return
        message = f"sent nothing for {limit_s:g} s"
        self._fail("timeout", message)
        if self.endpoint is _OTHER:
            self._relay.pool.report_failure(backend)
        else:
            self._relay.pool.report_timeout(backend, self._request_hash(), message)

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
            self._candidates(())
        except GatewayError as none_up:
            error = none_up
        self.end_with_error(error)

    def _end_trial_in_silence(self, backend: Backend, silent_s: float) -> bool:
        """Retry a request on trial whose backend is silent and does not report to be at work; return whether it was."""
        pool = self._relay.pool
        if self._head_sent or silent_s <= _DOWN_TIMEOUT_S + pool.rules.interval_s or pool.is_at_work(backend):
            return False
        if not self._retry("trial"):
            return False
        pool.report_timeout(backend, self._request_hash(), f"sent nothing for {silent_s:.0f} s")
        return True

    # Rescue of a stream

    def move(self, backend: Backend) -> bool:
        """Go on with a stream on another backend than `backend`, which does well; return whether it does."""
        if (
            self._rescue is None
            or self._call is None
            or self._upstream is None
            or self._upstream.backend is not backend
        ):
            return False
        return self._retry("moved") or self._continue("is being drained", may_return=True)

    def _continue(self, message: str, *, is_strike: bool = False, may_return: bool = False) -> bool:
        """Go on with a stream on another backend; return whether it does.

        Parameters
        ----------
        message, is_strike
            See `Failure`.
        may_return
            Whether its backend goes on if no other one can.
        """
        if self._left is not None:
            return self._return()
        rescue, relay, routed, upstream = self._rescue, self._relay, self._routed, self._upstream
        assert routed is not None
        assert upstream is not None
        if not (routed.model.rescue and self._head_sent):
            return False
        if rescue is None or not rescue.is_possible:
            return False if may_return else self._not_rescued()
        if rescue.is_generated:
            self._cancel_call()
            self.on_data(rescue.ending())
            self.on_end()
            return True
        headers, name = self._inbound.request_headers, upstream.backend.name
        try:
            candidates = self._candidates((name, *[failure.backend for failure in rescue.failures]))
        except GatewayError:
            return False if may_return else self._not_rescued()
        tokens = rescue.tokens_so_far
        was_paused = self._call is not None and self._call.paused
        if may_return and self._call is not None:
            self._call.pause()
            self._left, self._call = _Place(self._call, upstream, self._decision), None
        else:
            self._cancel_call()
        decision = replace(relay.router.choose(routed, candidates, headers.routing_headers), reason="rescue")
        upstream = routed.model.upstreams[decision.backend]
        self._decision, self._upstream = decision, upstream
        for observer in self._observers:
            observer.on_send(decision, candidates)
        upstream.backend.in_flight += 1
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        rescue.begin(self, Failure(name, message, is_strike=is_strike))
        if was_paused:
            self.pause()
        model = routed.model.name
        log.info("a stream of %s goes on at %s, %d tokens long: %s %s", model, decision.backend, tokens, name, message)
        return True

    def send_rescue(self, target: bytes, body: bytes, receiver: Rescue) -> None:
        """Send a request to the backend that goes on with the stream."""
        upstream = self._upstream
        assert upstream is not None
        was_paused = self._call is not None and self._call.paused
        self._last_read_s = time.perf_counter()
        self._call = upstream.client.send(self._upstream_head(upstream, target, body), body, receiver)
        if was_paused:
            self._call.pause()

    def leave(self) -> None:
        """Leave the backend that the stream came from for good."""
        if self._left is not None:
            self._leave_place(self._left)
        if self._answer is not None and self._answer.events is not None:
            self._answer.events.rest()  # part of an event, which the client does not get
            self._answer.events.watcher = None

    def _leave_place(self, left: _Place) -> None:
        self._left = None
        left.call.cancel()
        left.upstream.backend.in_flight -= 1

    def _return(self) -> bool:
        """Let the backend go on from which a stream was to be moved; return whether there is one."""
        left, rescue = self._left, self._rescue
        if left is None or rescue is None:
            return False
        self._left = None
        is_paused = self._call is not None and self._call.paused
        self._cancel_call()
        self._call, self._upstream, self._decision = left.call, left.upstream, left.decision
        rescue.give_up()
        if not is_paused:
            self.resume()
        return True

    def end_rescue(self) -> None:
        """End the stream, whatever its backend still does."""
        self._cancel_call()
        self.on_end()

    def rescue_is_inexact(self) -> None:
        """End with the failure that has interrupted the stream, unless its backend can go on."""
        if self._return():
            return
        assert self._rescue is not None
        failure = self._rescue.failures[-1]
        assert self._routed is not None
        self._cancel_call()
        self._upstream = self._routed.model.upstreams[failure.backend]
        self._fail("broken", failure.message)

    def _not_rescued(self) -> bool:
        """Count a stream with which no other backend goes on, unless one has; return False."""
        if self._upstream is not None and not (self._rescue is not None and self._rescue.failures):
            self._relay.metrics.rescues.labels(*self._upstream.metrics.labels, "impossible").inc()
        return False

    def _note_rescue(self, rescue: Rescue, ended: EndedExchange) -> None:
        """Note at the end of an exchange where its stream began, and count what came of it."""
        first = rescue.failures[0].backend
        ended.rescued_from, ended.rescued_at = first, rescue.tokens
        if ended.usage is None:
            ended.usage = rescue.usage()
        upstream = ended.routed.model.upstreams[first]
        outcome = {"ok": "complete", "cancelled": "cancelled"}.get(ended.label, "failed")
        self._relay.metrics.rescues.labels(*upstream.metrics.labels, outcome).inc()

    def _handle_stream_error(self, rescue: Rescue) -> None:
        """Go on with a stream that its engine has ended with an error, or pass the error on."""
        assert self._upstream is not None
        backend = self._upstream.backend
        error = rescue.take_error()
        self._relay.pool.report_failure(backend)
        if not self._continue("ended the answer with an error", is_strike=engine_error(error) != _OVERLOADED):
            self._reply.data(error)
            if self._answer is not None:
                self._answer.error_status = engine_error(error)

    def _waits_for_rescue(self) -> bool:
        return self._rescue is not None and self._rescue.is_waiting

    # Called by the upstream client

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass on an answer that was read in one piece."""
        upstream, call = self._upstream, self._call
        assert upstream is not None
        lines = upstream.lines_of_answer(head)
        if not upstream.answers_json or self.endpoint is _OTHER:
            headers = [header for header in head.headers if header[0] != b"content-length"]
            self.on_head(head.status, [*headers, (b"content-length", b"%d" % len(body))])
            if self._call is call and body:
                self.on_data(body)
            if self._call is call:
                self.on_end()
            return
        self._status = head.status
        answer = WholeAnswer(is_checked=True)
        answer.feed(body)
        try:
            answer.end()
        except InvalidAnswerError as error:
            self._retry_or_fail(error.kind, str(error))
            return
        for observer in self._observers:
            observer.on_answer(body, answer.document)
        self._head_sent = True
        self._reply.whole(head.status, self._lines(lines), body)
        self._succeed(answer)

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Decide by the head how much of the answer is held before it is passed on."""
        self._last_read_s = time.perf_counter()
        self._status, self._headers = status, headers
        if 300 <= status < 400 and not self._redirects_here(headers):
            self._fail("redirect", "redirects to another server, which the gateway does not follow")
            return
        try:
            self._answer = answer_for(self.endpoint, status, headers, self._inbound.body)
        except InvalidAnswerError as error:
            self._retry_or_fail(error.kind, str(error))
            return
        if self._rescue is not None and self._answer.events is not None:
            self._rescue.watch(self._answer.events)

    def on_data(self, data: bytes) -> None:
        """Pass on bytes of the answer, or hold them until the answer is known to be valid."""
        answer, now_s = self._answer, time.perf_counter()
        assert answer is not None
        previous_s, self._last_read_s = self._last_read_s, now_s
        if answer.events is None:
            self._times.first_s = now_s
        try:
            data = answer.feed(data)
        except InvalidAnswerError as error:
            self._retry_or_fail(error.kind, str(error))
            return
        if data:
            self._pass_on(answer, data, previous_s, now_s)
        if self._rescue is not None and self._rescue.has_error:
            self._handle_stream_error(self._rescue)

    def _pass_on(self, answer: PassThrough, data: bytes, previous_s: float, now_s: float) -> None:
        if not self._head_sent:
            if answer.error_status in _RETRYABLE and self._retry_status(answer.error_status):
                return
            self._send_head()
            self._times.first_s = now_s
        elif answer.events is not None:
            assert self._upstream is not None
            self._upstream.metrics.itl.observe(now_s - previous_s)
        if answer.events is not None:
            self._times.last_s = now_s
            for observer in self._observers:
                observer.on_chunk(data, now_s)
        self._reply.data(data)

    def on_end(self) -> None:
        """Pass on the end of the answer, and finish the exchange."""
        answer = self._answer
        assert answer is not None
        if self._status in _RETRYABLE and self._retry_status(self._status):
            return
        try:
            rest = answer.end()
        except InvalidAnswerError as error:
            self._retry_or_fail(error.kind, str(error))
            return
        if answer.events is not None and not answer.events.is_complete(self.endpoint):
            # By the book of HTTP, which cannot tell: with HTTP/1.0, or a proxy before the engine, every end looks so.
            self._retry_or_fail("broken", "ended the stream before its last event", is_strike=not self._was_paused)
            return
        if isinstance(answer, WholeAnswer) and answer.body is not None:
            for observer in self._observers:
                observer.on_answer(answer.body, answer.document)
        if not self._head_sent:
            self._send_head()
        if rest:
            self._reply.data(rest)
        self._reply.end()
        self._succeed(answer)

    def on_error(self, error: UpstreamError) -> None:
        """Retry on another backend, or fail."""
        if self._left is not None:  # the stream can be nowhere but where it is being moved to
            self._leave_place(self._left)
            return
        self.on_rescue_error(error)

    def on_rescue_error(self, error: UpstreamError) -> None:
        """Retry on another backend, or fail; called for the backend that the stream is at, or is being moved to."""
        # A server may cut an answer that nobody reads: then the client was too slow.
        is_strike = error.kind in {"broken", "garbage"} and not self._was_paused
        self._retry_or_fail(error.kind, str(error), is_strike=is_strike)

    # Ending the exchange

    def _fail(self, kind: str, message: str) -> None:
        assert self._upstream is not None
        message = f"Backend {self._upstream.backend.name} {message}"
        if self._head_sent:
            message += ": this answer is not complete"
        status = _STATUSES.get(kind, 502)
        retry_after_s = 2.0 if status == 503 else None
        message = f"{message}.{_ADVICE.get(kind, '') if self._may_repeat() else ''}"
        self.end_with_error(GatewayError(status, message, code=f"backend_{kind}", retry_after_s=retry_after_s))

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error: as the answer, as an event of a stream that has begun, else by closing the connection."""
        if not self._head_sent:
            self._cancel_call()
            self._answer_with(error)
            self._finish(error.status, "unanswered")
            return
        if self._end_if_complete():
            return
        self._cancel_call()
        if self._answer is not None and self._answer.events is not None:
            self._reply.data(error.event(self.endpoint))
            self._reply.end()
        else:
            self._reply.abort()
        self._finish(error.status, "interrupted")

    def _answer_with(self, error: GatewayError) -> None:
        send_error(self._reply, error, self._inbound.path, self._request_id, self._choice_lines())

    def _send_head(self) -> None:
        assert self._upstream is not None
        self._head_sent = True
        if self._is_on_trial() and self._is_served():  # the rest of a long answer is no further evidence
            self._relay.pool.report_success(self._upstream.backend)
        self._reply.head(self._status, self._lines(self._upstream.lines_for_client(self._headers)))

    def _redirects_here(self, headers: HeaderList) -> bool:
        assert self._upstream is not None
        authority = self._upstream.client.address.authority
        locations = [value for name, value in headers if name == b"location"]
        return all(relative_location(location, authority) is not None for location in locations)

    def _lines(self, lines: bytes) -> bytes:
        return lines + request_id_lines(self._inbound.path, self._request_id) + self._choice_lines()

    def _choice_lines(self) -> bytes:
        decision, upstream, lines = self._decision, self._upstream, self._inbound.request_headers.answer_lines
        if decision is None or upstream is None:
            return lines
        return lines + upstream.lines_of_choice(decision, self._retried_from())

    def _retried_from(self) -> str:
        return "" if self._retried is None else self._retried.backend.name

    def _complete_stream(self) -> PassThrough | None:
        """Return the answer, with its usage, if it is a stream whose last event was passed on."""
        answer = self._answer
        if not self._head_sent or answer is None or answer.events is None:
            return None
        if not answer.events.is_complete(self.endpoint):
            return None
        answer.end()
        return answer

    def _end_if_complete(self) -> bool:
        """End the exchange if its stream has passed on its last event; return whether it has.

        What happens after that event (no end of the HTTP message, a cut, silence) is lost on no client.
        """
        answer = self._complete_stream()
        if answer is None:
            return False
        self._cancel_call()
        self._reply.end()
        self._succeed(answer)
        return True

    def _is_served(self) -> bool:
        """Return whether the answer shows that the backend can serve requests for inference."""
        answer = self._answer
        return self._status < 300 and self.endpoint is not _OTHER and answer is not None and not answer.error_status

    def _succeed(self, answer: PassThrough) -> None:
        assert self._upstream is not None
        self._release()
        self._answer = answer
        assert self._routed is not None
        status, pool, first = self._status, self._relay.pool, self._retried
        if self._is_served():
            pool.report_success(self._upstream.backend)
            if first is not None and first.message:
                # Another backend served the request, so the first one was at fault.
                pool.report_strike(first.backend, self._request_hash(), first.message)
            if self._rescue is not None:
                for failure in self._rescue.failures:
                    if failure.is_strike:
                        backend = self._routed.model.upstreams[failure.backend].backend
                        pool.report_strike(backend, self._request_hash(), failure.message)
        elif answer.error_status and answer.error_status != _OVERLOADED and (first is None or not first.message):
            pool.report_strike(self._upstream.backend, self._request_hash(), "ended a stream with an error")
        label = "ok" if status < 400 else "client_error" if status < 500 else "engine_error"
        if answer.error_status:
            label = "engine_error"
        self._finish(status, label)

    def _finish(self, status: int, label: str) -> None:
        """Account for the exchange, and have the observers see its end."""
        relay, routed, answer = self._relay, self._routed, self._answer
        assert routed is not None
        relay.exchanges.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        routed.model.traffic.in_flight -= 1
        self._times.ended_s = time.perf_counter()
        ended = EndedExchange(
            self._request_id,
            self._inbound.request_headers.client,
            routed,
            self._decision,
            self._upstream,
            self._retried_from(),
            status,
            label,
            self._times,
            None if answer is None else answer.usage,
            None if answer is None else answer.events,
            unread_bytes=0 if answer is None else answer.unread_bytes,
        )
        if self._rescue is not None and self._rescue.failures:
            self._note_rescue(self._rescue, ended)
        if self.endpoint is _OTHER:
            inbound = self._inbound
            count(ended, relay.metrics)
            charge(ended, inbound.path, inbound.request_headers.method, inbound.body, answer)
        else:
            account(ended, relay.metrics, is_observed=bool(self._observers))
        if ended.tokens:
            relay.metrics.keys.labels(ended.client.name).inc(ended.tokens)
        relay.limits.leave(ended.client, ended.tokens)
        for observer in self._observers:
            observer.on_end(ended)
        if self._queue is not None:
            if self._place is not None:
                self._queue.leave(self._place)
                self._place = None
            self._queue.dispatch()
