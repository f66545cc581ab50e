"""The reception of an answer from a backend: what of it is passed on, and what is a failure."""

from __future__ import annotations

import time
from typing import Final

from backends.http.client import AnswerHead, HeaderList, UpstreamError
from gateway.dialects.asked_usage import HiddenUsage
from gateway.http.headers import relative_location
from gateway.relay.answers import InvalidAnswerError, PassThrough, WholeAnswer
from gateway.relay.attempt import Attempt
from gateway.relay.delivery import Delivery
from gateway.relay.host import Host
from gateway.relay.rescue import Handover
from policies.features.request import Endpoint

_OTHER: Final = Endpoint.OTHER
_REFUSALS: Final = frozenset({400, 422})
_RETRYABLE: Final = frozenset({500, 502, 503})  # not 504: a server between says that the engine is slow


class Reception:
    """The receiver of the call of one attempt."""

    __slots__ = ("_attempt", "_delivery", "_handover", "_host")

    def __init__(self, host: Host, attempt: Attempt, delivery: Delivery, handover: Handover | None) -> None:
        self._host = host
        self._attempt = attempt
        self._delivery = delivery
        self._handover = handover

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass on an answer that was read in one piece."""
        attempt, delivery = self._attempt, self._delivery
        upstream, call = attempt.upstream, attempt.call
        lines = upstream.lines_of_answer(head)
        if not upstream.answers_json or delivery.endpoint is _OTHER:
            headers = [header for header in head.headers if header[0] != b"content-length"]
            self.on_head(head.status, [*headers, (b"content-length", b"%d" % len(body))])
            if attempt.call is call and body:
                self.on_data(body)
            if attempt.call is call:
                self.on_end()
            return
        if self._refuses_to_be_asked(head.status, body):
            return
        delivery.status = head.status
        answer = WholeAnswer(is_checked=True)
        answer.feed(body)
        try:
            answer.end()
        except InvalidAnswerError as error:
            self._host.retry_or_fail(error.kind, str(error))
            return
        delivery.send_whole(answer, lines, body, attempt)
        self._host.succeed(answer)

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Decide by the head how much of the answer is held before it is passed on."""
        self._attempt.last_read_s = time.perf_counter()
        if 300 <= status < 400 and not self._redirects_here(headers):
            self._delivery.status = status
            self._host.fail("redirect", "redirects to another server, which the gateway does not follow")
            return
        try:
            answer = self._delivery.open(status, headers)
        except InvalidAnswerError as error:
            self._host.retry_or_fail(error.kind, str(error))
            return
        if answer.events is None:
            return
        attempt = self._attempt
        if self._handover is not None:
            self._handover.watch(answer.events)
        if attempt.is_asked:
            answer.events.hidden = HiddenUsage(attempt.upstream.habits)
        elif attempt.has_refused:
            attempt.upstream.habits.note_refusal()

    def on_data(self, data: bytes) -> None:
        """Pass on bytes of the answer, or hold them until the answer is known to be valid."""
        attempt, answer, now_s = self._attempt, self._delivery.answer, time.perf_counter()
        assert answer is not None
        previous_s, attempt.last_read_s = attempt.last_read_s, now_s
        if answer.events is None:
            self._delivery.times.first_s = now_s
        try:
            data = answer.feed(data)
        except InvalidAnswerError as error:
            self._host.retry_or_fail(error.kind, str(error))
            return
        if data:
            self._pass_on(answer, data, previous_s, now_s)
        if self._handover is not None and self._handover.rescue.has_error:
            event = self._handover.pass_error(self._host)
            if event:
                self._delivery.send_error_event(answer, event)

    def _pass_on(self, answer: PassThrough, data: bytes, previous_s: float, now_s: float) -> None:
        if not self._delivery.has_begun:
            if answer.error_status in _RETRYABLE and self._host.retry_status(answer.error_status):
                return
            self._send_head()
            self._delivery.times.first_s = now_s
        elif answer.events is not None:
            self._attempt.upstream.metrics.itl.observe(now_s - previous_s)
        self._delivery.send(answer, data, now_s)

    def on_end(self) -> None:
        """Pass on the end of the answer, and finish the exchange."""
        delivery = self._delivery
        answer = delivery.answer
        assert answer is not None
        if delivery.status in _RETRYABLE and self._host.retry_status(delivery.status):
            return
        try:
            rest = answer.end()
        except InvalidAnswerError as error:
            self._host.retry_or_fail(error.kind, str(error))
            return
        if answer.events is not None and not answer.events.is_complete(self._delivery.endpoint):
            # Valid HTTP, which cannot tell: with HTTP/1.0, or a proxy before the engine, every end looks like this.
            self._host.retry_or_fail(
                "broken", "ended the stream before its last event", is_strike=not delivery.was_paused
            )
            return
        if self._refuses_to_be_asked(delivery.status, rest):
            return
        delivery.note_whole(answer)
        if not delivery.has_begun:
            self._send_head()
        delivery.end(rest)
        self._host.succeed(answer)

    def _refuses_to_be_asked(self, status: int, body: bytes) -> bool:
        """Return whether the engine refuses to be asked for usage, in which case it gets the request unasked."""
        is_refusal = status in _REFUSALS and self._attempt.is_asked and b"stream_options" in body
        if is_refusal and not self._delivery.has_begun:
            self._host.repeat_unasked()
            return True
        return False

    def on_error(self, error: UpstreamError) -> None:
        """Retry on another backend, or fail."""
        if self._handover is not None and self._handover.left is not None:
            self._handover.leave_place()  # the stream can be nowhere but where it is being moved to
            return
        self._host.attempt_failed(error)

    def _send_head(self) -> None:
        if (self._attempt.is_on_trial or self._delivery.retried_from) and self._delivery.is_served():
            self._host.note_served()  # the rest of a long answer is no further evidence
        self._delivery.send_head(self._attempt)

    def _redirects_here(self, headers: HeaderList) -> bool:
        authority = self._attempt.upstream.client.address.authority
        locations = [value for name, value in headers if name == b"location"]
        return all(relative_location(location, authority) is not None for location in locations)
