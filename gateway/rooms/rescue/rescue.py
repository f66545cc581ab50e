"""The rescue of one stream: the calls to the backend that resumes it."""

from __future__ import annotations

import logging
from typing import Final

import orjson

from backends.backend import Backend
from backends.http.receiver import HeaderList, Receiver, UpstreamError
from backends.reported import MOST_CONTEXT_TOKENS
from gateway.dialects.sse import EventStream
from gateway.dialects.usage import Usage
from gateway.http.headers import media_type
from gateway.relay.failures import Outlook
from gateway.relay.roles import Rescued, Streaming
from gateway.rooms.rescue.continued import ContinuedStream, InexactSeamError, ends_within_character
from gateway.rooms.rescue.passed import PassedStream
from gateway.rooms.rescue.request import COMPLETIONS_TARGET, RescuableRequest, rescuable
from gateway.routing.access import RequestHeaders
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest

log = logging.getLogger(__name__)

MAX_RESCUES: Final = 2
"""Most rescues of a request: one that crashes its backends must not go through the whole pool."""

_DECODE_TARGET: Final = b"/detokenize"
_MAX_DECODED_BYTES: Final = 1 << 23
_MAX_DROPPED: Final = 3  # tokens of an incomplete character, which has up to four bytes


class Rescue(Receiver):
    """Resumes the stream of one exchange at another backend: a `Rescuer`, and the receiver of its calls.

    First, the other backend decodes the tokens so far: their text must be the client's. Then it continues them.
    """

    def __init__(self, target: bytes, request: RescuableRequest | None) -> None:
        self._target = target  # of the request
        self.left: list[str] = []
        self.is_waiting = False
        self._attempt: Streaming | None = None  # at the backend that should resume; None before a rescue
        self._request = request  # None if no other backend could resume it
        self._passed: PassedStream | None = None  # what the client has; None before the first event
        self._events: EventStream | None = None
        self._left_tokens = 0  # tokens of the answer when the first backend failed
        self._left_at: Upstream | None = None  # the last backend that failed
        self._left_message = ""
        self._continued: ContinuedStream | None = None
        self._status = 0
        self._decoded: list[bytes] = []
        self._decoded_bytes = 0
        self._dropped = 0

    # Called by the exchange and its attempt

    @property
    def body(self) -> bytes | None:
        """The body to send in place of the request's; None if no other backend could resume it."""
        return None if self._request is None else self._request.body

    @property
    def has_ids(self) -> bool:
        """Whether the engine has sent token ids."""
        return self._passed is not None and self._passed.prompt != b""

    def watch(self, events: EventStream) -> None:
        """Follow the events of a new stream."""
        if self._request is not None:
            self._events, self._passed = events, PassedStream()
            events.watch(self._passed)

    def outlook(self) -> Outlook:
        """Return what can be done for the rest of the stream."""
        if self._passed is None or not self._passed.is_exact:
            return Outlook.NONE
        if self._passed.finish_reason:
            return Outlook.END
        return Outlook.ELSEWHERE if len(self.left) < MAX_RESCUES else Outlook.NONE

    def go_on(self, attempt: Streaming, candidates: list[Backend], message: str) -> None:
        """Resume the stream on one of the candidates; `message` says what the current backend did."""
        request, passed = self._parts()
        upstream = attempt.upstream
        name = upstream.backend.name
        if not self.left:
            self._left_tokens = len(passed.ids)
        self.left.append(name)
        self._left_at, self._left_message = upstream, message
        following = self._attempt = attempt.leave_for(candidates)
        if self._events is not None:
            self._events.restart()
        self._continued, self.is_waiting, self._dropped = None, True, 0
        model, to = upstream.backend.model, following.upstream.backend.name
        fields = {"request_id": attempt.request_id.decode("latin-1"), "model": model, "backend": to}
        text = "a stream of %s goes on at %s, %d tokens long: %s %s"
        log.info(text, model, to, len(passed.ids), name, message, extra={"fields": fields})
        if passed.text:
            self._decode()
        else:  # resend the request: the client has no text, only marks such as the start of reasoning
            passed.drop_ids(len(passed.ids))
            self._continued = ContinuedStream(request, passed)
            following.ask(self._target, request.body, self)

    def close(self, attempt: Streaming) -> None:
        """Write the missing end of a stream whose whole text has been passed on."""
        request, passed = self._parts()
        if self._events is not None:
            self._events.restart()
        _end_with(attempt, ContinuedStream(request, passed).close(passed.finish_reason))

    def rescued(self) -> Rescued | None:
        """Return what was rescued; None if no other backend resumed the stream."""
        if not self.left or self._passed is None:
            return None
        usage = Usage(prompt_tokens=len(self._passed.prompt_ids), output_tokens=len(self._passed.ids))
        return Rescued(self.left[0], self._left_tokens, usage)

    # Called by the upstream client

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Keep the status; fail if the answer is not an event stream."""
        self._status = status
        if self._continued is None:
            return
        kind = media_type(dict(headers).get(b"content-type", b""))
        if status != 200 or kind != b"text/event-stream":
            self.on_error(UpstreamError("refused", f"answered {status} to a request for the rest of an answer"))

    def on_data(self, data: bytes) -> None:
        """Pass events on, or collect the decoded text."""
        continued, attempt = self._continued, self._now()
        if continued is None:
            self._decoded.append(data)
            self._decoded_bytes += len(data)
            if self._decoded_bytes > _MAX_DECODED_BYTES:
                self._give_up()
            return
        self.is_waiting = False
        if events := continued.feed(data):
            attempt.on_data(events)
        if continued.has_error:
            self.on_error(UpstreamError("broken", "ended the rest of an answer with an error"))

    def on_end(self) -> None:
        """Check the decoded text and continue, or end the stream."""
        if self._continued is None:
            self._continue()
        elif self._continued.is_done:
            self._now().on_end()
        else:
            self.on_error(UpstreamError("broken", "ended the rest of an answer before it was complete"))

    def on_error(self, error: UpstreamError) -> None:
        """Handle a failure of the resuming backend like any other."""
        self._now().on_error(error)

    # The two calls

    def _decode(self) -> None:
        request, passed = self._parts()
        self._decoded, self._decoded_bytes = [], 0
        ids = passed.ids[: len(passed.ids) - self._dropped].tolist()
        self._now().ask(_DECODE_TARGET, orjson.dumps({"model": request.model, "tokens": ids}), self)

    def _continue(self) -> None:
        """Continue the tokens so far, if their text is the client's."""
        request, passed = self._parts()
        try:
            decoded = orjson.loads(b"".join(self._decoded))["prompt"] if self._status == 200 else None
            if not isinstance(decoded, str):
                raise InexactSeamError  # noqa: TRY301
            is_cut = ends_within_character(passed.text, decoded)
        except (orjson.JSONDecodeError, KeyError, TypeError, InexactSeamError):
            self._give_up()
            return
        if is_cut:
            self._dropped += 1
            if self._dropped > min(_MAX_DROPPED, len(passed.ids) - 1):
                self._give_up()
            else:
                self._decode()
            return
        passed.drop_ids(self._dropped)
        continued = self._continued = ContinuedStream(request, passed)
        remaining = request.remaining_tokens(len(passed.ids))
        if remaining is not None and remaining <= 0:
            _end_with(self._now(), continued.close("length"))
            return
        context = self._now().upstream.backend.engine.said.context_tokens or MOST_CONTEXT_TOKENS
        prompt_ids, ids = passed.prompt_ids.tolist(), passed.ids.tolist()
        self._now().ask(COMPLETIONS_TARGET, request.continuation(prompt_ids, ids, context), self)

    def _give_up(self) -> None:
        """End the stream with the error of the failed backend, since no exact continuation is possible."""
        assert self._left_at is not None
        self._now().give_up(self._left_at, self._left_message)

    def _now(self) -> Streaming:
        assert self._attempt is not None
        return self._attempt

    def _parts(self) -> tuple[RescuableRequest, PassedStream]:
        assert self._request is not None
        assert self._passed is not None
        return self._request, self._passed


def _end_with(attempt: Streaming, events: bytes) -> None:
    """End a stream with these last events, whatever its backend still sends."""
    attempt.cancel()
    attempt.on_data(events)
    attempt.on_end()


def rescue_for(request: RequestHeaders, body: bytes, routed: RoutedRequest) -> Rescue:
    """Return the rescuer of a request's stream."""
    found = None
    if routed.document is not None and not routed.headers.backend:
        found = rescuable(request.endpoint, body, routed.document)
    return Rescue(request.target, found)
