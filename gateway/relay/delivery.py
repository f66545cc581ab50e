"""Delivers an answer: tracks what the client has received, and passes on more of it, its end, or an error."""

from __future__ import annotations

import time
from typing import ClassVar, Final

from backends.http.receiver import HeaderList
from gateway.dialects.errors import GatewayError
from gateway.http.headers import request_id_lines
from gateway.relay.answers import PassThrough, WholeAnswer, answer_for
from gateway.relay.failures import Has
from gateway.relay.observers import EndedExchange, Observer, tell_answer, tell_chunk
from gateway.relay.roles import Reply, Rescued, send_error
from gateway.routing.access import RequestHeaders
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import Endpoint
from policies.policy import Decision

_now_s: Final = time.perf_counter
_OTHER: Final = Endpoint.OTHER
_NO_HEADERS: Final[HeaderList] = []


class Delivery(EndedExchange):
    """The answer on its way to the client; at the end, the record of the exchange."""

    __deletable__: ClassVar[list[str]] = ["_reply"]  # for mypyc

    def __init__(
        self, reply: Reply, request: RequestHeaders, request_id: bytes, arrived_s: float, observers: list[Observer]
    ) -> None:
        super().__init__(request_id, request.client, arrived_s)
        self._reply = reply
        self.request = request
        self._headers = _NO_HEADERS
        # The answer of the current attempt; for a rescued stream, that of the first. None before its head.
        self.answer: PassThrough | None = None
        self.endpoint = request.endpoint  # the API of the request
        self.has_begun = False  # whether the client has part of the answer
        self.observers = observers  # observers of the exchange
        self.is_paused = False  # whether the client is slow to receive it

    def restart(self) -> None:
        """Drop what an earlier attempt left, none of which the client has."""
        self.answer = None
        self.first_s = 0.0

    def retry_from(self, backend: str) -> None:
        """Record the backend that failed the request."""
        self.retried_from = backend

    def wait(self, seconds: float) -> None:
        """Record the time that the request has waited in the gateway."""
        self.waited_s = seconds

    def pause(self, *, is_paused: bool) -> None:
        """Record whether the client is slow to receive the answer."""
        self.is_paused = is_paused
        self.was_paused = self.was_paused or is_paused

    def note_first(self, now_s: float) -> None:
        """Record when the first bytes of the answer arrived."""
        self.first_s = now_s

    def open(self, status: int, headers: HeaderList, routed: RoutedRequest) -> PassThrough:
        """Decide by the head how much of the answer is held before it is passed on."""
        self.status, self._headers = status, headers
        answer = answer_for(self.endpoint, status, headers, routed.items, has_choices=routed.has_choices)
        self.answer = answer
        return answer

    def send_head(self, upstream: Upstream, decision: Decision) -> None:
        """Begin the answer."""
        self.has_begun = True
        lines = self._lines(upstream.lines_for_client(self._headers), upstream, decision)
        self._reply.head(self.status, lines)

    def send(self, answer: PassThrough, data: bytes, now_s: float) -> None:
        """Pass on bytes of the answer."""
        if answer.events is not None:
            self.last_s = now_s
            if self.observers:
                tell_chunk(self.observers, data, now_s)
        self._reply.data(data)

    def send_whole(
        self, answer: WholeAnswer, status: int, lines: bytes, body: bytes, upstream: Upstream, decision: Decision
    ) -> None:
        """Pass on an answer that was read in one piece; `lines` are its header lines for the client."""
        if self.observers:
            tell_answer(self.observers, body, answer.document)
        self.answer, self.status, self.has_begun = answer, status, True
        self._reply.whole(status, self._lines(lines, upstream, decision), body)

    def note_whole(self, answer: PassThrough) -> None:
        """Show a complete answer in one piece to the observers."""
        if self.observers and isinstance(answer, WholeAnswer) and answer.body is not None:
            tell_answer(self.observers, answer.body, answer.document)

    def end(self, rest: bytes = b"") -> None:
        """Pass on the rest of the answer, and end it."""
        if rest:
            self._reply.data(rest)
        self._reply.end()

    def answer_with(self, error: GatewayError, choice_lines: bytes = b"") -> None:
        """Answer with an error, before anything was passed on. `choice_lines` are header lines about a backend."""
        request = self.request
        send_error(self._reply, error, request.path, self.request_id, request.answer_lines + choice_lines)

    def interrupt(self, error: GatewayError) -> None:
        """End an answer that has begun: a stream with an error event, any other by closing the connection."""
        if self.answer is not None and self.answer.events is not None:
            self._reply.data(error.event(self.endpoint))
            self._reply.end()
        else:
            self._reply.abort()

    def complete_stream(self) -> PassThrough | None:
        """Return the answer, with its usage, if it is a stream whose last event was passed on."""
        answer = self.answer
        if answer is None or self.has() is not Has.ALL:
            return None
        answer.end()
        return answer

    def has(self) -> Has:
        """Return what the client has of the answer."""
        answer = self.answer
        if not self.has_begun or answer is None:
            return Has.NOTHING
        return Has.ALL if answer.events is not None and answer.events.ending.is_complete else Has.PART

    def is_served(self) -> bool:
        """Return whether the answer shows that the backend can serve requests for inference."""
        answer = self.answer
        is_inference = self.endpoint is not _OTHER
        return self.status < 300 and is_inference and answer is not None and not answer.error_status

    def note_end(
        self,
        routed: RoutedRequest,
        upstream: Upstream | None,
        decision: Decision | None,
        rescued: Rescued | None,
        status: int,
        label: str,
    ) -> None:
        """Record how the exchange ends."""
        self.routed, self.upstream, self.decision = routed, upstream, decision
        self.status, self.label, self.ended_s = status, label, _now_s()
        if (answer := self.answer) is not None:
            self.usage, self.stream, self.unread_bytes = answer.usage, answer.events, answer.unread_bytes
        if rescued is not None:
            self.rescued_from, self.rescued_at = rescued.backend, rescued.tokens
            if self.usage is None:
                self.usage = rescued.usage

    def let_go(self) -> list[Observer]:
        """Return the observers; drop them, the client and the answer, since others may keep the record."""
        observers, self.observers = self.observers, []
        self.answer, self._headers = None, _NO_HEADERS
        del self._reply
        return observers

    def _lines(self, lines: bytes, upstream: Upstream, decision: Decision) -> bytes:
        """Return the header lines of an answer, from those of the engine."""
        request = self.request
        choice_lines = upstream.lines_of_choice(decision, self.retried_from)
        id_lines = request_id_lines(request.path, self.request_id)
        return b"%b%b%b%b" % (lines, id_lines, request.answer_lines, choice_lines)
