"""The calls to another backend that goes on with a stream."""

from __future__ import annotations

from typing import Final, Protocol

import orjson

from backends.http.client import HeaderList, UpstreamError
from gateway.dialects.sse import EventStream
from gateway.dialects.usage import Usage
from gateway.http.headers import media_type
from gateway.relay.rescue.continued import ContinuedStream, InexactSeamError, pending_text, reach
from gateway.relay.rescue.passed import PassedStream
from gateway.relay.rescue.request import COMPLETIONS_TARGET, RescuableRequest, rescuable
from policies.features.request import Endpoint

MAX_RESCUES: Final = 2
"""Rescues of a request: one that brings down whatever serves it must not go through the whole pool."""

_DECODE_TARGET: Final = b"/detokenize"
_MAX_DECODED_BYTES: Final = 1 << 23
_MAX_DROPPED: Final = 3  # tokens of an incomplete character, which has up to four bytes


class Host(Protocol):
    """The handover of the stream that is rescued."""

    def send_rescue(self, target: bytes, body: bytes, receiver: Rescue) -> None:
        """Send a request to the backend that is to go on."""

    def on_data(self, data: bytes) -> None:
        """Pass on events."""

    def on_end(self) -> None:
        """End the stream."""

    def end_rescue(self) -> None:
        """End the stream, whatever its backend still does."""

    def leave(self) -> None:
        """Leave the backend that the stream came from for good."""

    def on_rescue_error(self, error: UpstreamError) -> None:
        """Try another backend, or end with an error."""

    def rescue_is_inexact(self) -> None:
        """Go back to the backend that the stream came from if it can go on, or end with the error that occurred."""


class Failure:
    """The failure of a backend in the middle of a stream."""

    __slots__ = ("backend", "is_strike", "message")

    def __init__(self, backend: str, message: str, *, is_strike: bool) -> None:
        self.backend = backend  # its name
        self.message = message  # what it did
        self.is_strike = is_strike  # whether that is evidence against it once another backend has completed the stream


class Rescue:
    """A stream that another backend can go on with; the receiver of the calls for that.

    First the backend that is to go on decodes the tokens so far. Their text must be the one that the client has, except
    for what its engine withheld. Then it continues them.
    """

    def __init__(self, request: RescuableRequest, target: bytes) -> None:
        self.request = request  # the request, with the body to be sent
        self.passed: PassedStream | None = None  # what the client has; None before the first event
        self.failures: list[Failure] = []  # the backends that failed in the middle of the stream
        self.tokens = 0  # tokens of the answer when the first of them failed
        self.is_waiting = False  # whether the backend that is to go on has not sent anything yet
        self._target = target
        self._host: Host | None = None
        self._continued: ContinuedStream | None = None
        self._status = 0
        self._decoded: list[bytes] = []
        self._decoded_bytes = 0
        self._dropped = 0

    def watch(self, events: EventStream) -> None:
        """Follow the events of a stream that begins."""
        self.passed = events.watcher = PassedStream()

    @property
    def has_error(self) -> bool:
        """Whether the engine has ended the stream with an error, which is withheld."""
        return self.passed is not None and bool(self.passed.withheld)

    def take_error(self) -> bytes:
        """Return the withheld events, and forget them."""
        assert self.passed is not None
        error, self.passed.withheld = self.passed.withheld, b""
        return error

    @property
    def tokens_so_far(self) -> int:
        """Number of tokens of the answer that the client has."""
        return 0 if self.passed is None else len(self.passed.ids)

    @property
    def is_possible(self) -> bool:
        """Whether another backend can go on from where the stream is."""
        if self.passed is None or not self.passed.is_exact:
            return False
        return len(self.failures) < MAX_RESCUES or self.is_generated

    @property
    def is_generated(self) -> bool:
        """Whether the whole text has been passed on, and only the end of the stream is missing."""
        return self.passed is not None and bool(self.passed.finish_reason)

    def ending(self) -> bytes:
        """Return the events that are missing at the end of a stream whose whole text has been passed on."""
        assert self.passed is not None
        return ContinuedStream(self.request, self.passed).close(self.passed.finish_reason)

    def begin(self, host: Host, failure: Failure) -> None:
        """Continue at another backend, after a failure."""
        assert self.passed is not None
        if not self.failures:
            self.tokens = self.tokens_so_far
        self.failures.append(failure)
        self._host, self._continued, self.is_waiting = host, None, True
        self._dropped = 0
        if self.passed.ids:
            self._decode()
        else:  # as the request was: nothing has been generated
            self._continued = ContinuedStream(self.request, self.passed)
            host.leave()
            host.send_rescue(self._target, self.request.body, self)

    def give_up(self) -> None:
        """Forget the last failure: the backend goes on."""
        self.failures.pop()
        self.is_waiting = False

    def usage(self) -> Usage | None:
        """Return the usage of a rescued stream."""
        if self.passed is None or not self.failures:
            return None
        return Usage(prompt_tokens=len(self.passed.prompt_ids), output_tokens=len(self.passed.ids))

    # Called by the upstream client

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Keep the status, and refuse what is no stream of events."""
        self._status = status
        if self._continued is None:
            return
        kind = media_type(dict(headers).get(b"content-type", b""))
        if status != 200 or kind != b"text/event-stream":
            self._fail("refused", f"answered {status} to a request for the rest of an answer")

    def on_data(self, data: bytes) -> None:
        """Pass events on, or keep a decoded text."""
        assert self._host is not None
        continued = self._continued
        if continued is None:
            self._decoded.append(data)
            self._decoded_bytes += len(data)
            if self._decoded_bytes > _MAX_DECODED_BYTES:
                self._host.rescue_is_inexact()
            return
        self.is_waiting = False
        if events := continued.feed(data):
            self._host.on_data(events)
        if continued.is_stopped:
            self._host.end_rescue()
        elif continued.has_error:
            self._fail("broken", "ended the rest of an answer with an error")

    def on_end(self) -> None:
        """Go on with the decoded text, or end the stream."""
        assert self._host is not None
        if self._continued is None:
            self._continue()
        elif self._continued.is_done:
            self._host.on_end()
        else:
            self._fail("broken", "ended the rest of an answer before it was complete")

    def on_error(self, error: UpstreamError) -> None:
        """Try another backend, or end with an error."""
        assert self._host is not None
        self._host.on_rescue_error(error)

    # The two calls

    def _decode(self) -> None:
        assert self._host is not None
        assert self.passed is not None
        self._decoded, self._decoded_bytes = [], 0
        ids = self.passed.ids[: len(self.passed.ids) - self._dropped].tolist()
        body = orjson.dumps({"model": self.request.model, "tokens": ids})
        self._host.send_rescue(_DECODE_TARGET, body, self)

    def _continue(self) -> None:
        """Continue the tokens so far, if their text is the one that the client has."""
        host, passed, request = self._host, self.passed, self.request
        assert host is not None
        assert passed is not None
        try:
            decoded = orjson.loads(b"".join(self._decoded))["prompt"] if self._status == 200 else None
            if not isinstance(decoded, str):
                raise InexactSeamError  # noqa: TRY301
            pending = pending_text(passed.text, decoded, self._most_withheld())
        except (orjson.JSONDecodeError, KeyError, TypeError, InexactSeamError):
            host.rescue_is_inexact()
            return
        if pending is None:
            self._dropped += 1
            if self._dropped > min(_MAX_DROPPED, len(passed.ids) - 1):
                host.rescue_is_inexact()
            else:
                self._decode()
            return
        passed.drop_ids(self._dropped)
        host.leave()
        continued = self._continued = ContinuedStream(request, passed, pending)
        remaining = request.remaining_tokens(len(passed.ids))
        if remaining is not None and remaining <= 0:
            host.on_data(continued.close("length"))
            host.end_rescue()
            return
        body = request.continuation(passed.prompt_ids.tolist(), passed.ids.tolist())
        host.send_rescue(COMPLETIONS_TARGET, body, self)

    def _most_withheld(self) -> int:
        """Return how many characters may have been withheld, by the last engine and at each earlier seam."""
        chars = reach(self.request.stops)
        return (0 if self.request.includes_stop else chars) + 2 * (len(self.failures) - 1) * chars

    def _fail(self, kind: str, message: str) -> None:
        assert self._host is not None
        self._host.on_rescue_error(UpstreamError(kind, message))


def rescue_for(endpoint: Endpoint, target: bytes, body: bytes) -> Rescue | None:
    """Return the rescue of a request; None if no other backend could go on with it."""
    request = rescuable(endpoint, body)
    return None if request is None else Rescue(request, target)
