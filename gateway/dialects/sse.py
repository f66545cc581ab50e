"""Inspection of a stream of server-sent events as it is relayed, at about a microsecond per chunk."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

import orjson

from gateway.dialects.asked_usage import HiddenUsage
from policies.features.request import Endpoint

_HOLD_LIMIT_BYTES = 1 << 20
_CR_ENDS_LINE: Final = re.compile(rb"[^\r\n]*\r[^\n]")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
# What marks the events that carry output, for endpoints where not every event does.
_MARKERS = {Endpoint.MESSAGES: b"event: content_block_delta", Endpoint.RESPONSES: b".delta\n"}
# The types of the events that end a stream; those of the other endpoints end with `[DONE]`.
_LAST_TYPES: Final = {
    Endpoint.MESSAGES: frozenset({"message_stop"}),
    Endpoint.RESPONSES: frozenset({"response.completed", "response.incomplete", "response.failed"}),
}


class EventWatcher(Protocol):
    """What sees the complete events of a stream before its client."""

    def take(self, data: bytes) -> bytes:
        """Return what the client gets of complete events."""


class EventStream:
    r"""Passes on complete events and counts them.

    An event split over two reads is held until its end arrives: if the backend fails in the middle of an event, the
    stream can still end with an error event that the client can read.

    Examples
    --------
    >>> stream = EventStream(Endpoint.COMPLETIONS)
    >>> stream.feed(b"data: 1\n\ndata:")
    b'data: 1\n\n'
    >>> stream.feed(b" 2\n\n"), stream.events
    (b'data: 2\n\n', 2)
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._marker = _MARKERS.get(endpoint)
        self._held = b""
        self._has_cr = False  # for LF, which is passed on in its place: both are line ends by the standard
        self._recent: deque[bytes] = deque(maxlen=3)  # usage is in the last event, or the one before [DONE]
        self.events = 0  # events passed on
        self.deltas = 0  # events that carry output, if the endpoint marks them; else 0 (see `content_chunks`)
        self.watcher: EventWatcher | None = None  # sees the events before the client; None for no watcher
        # Takes out what the client did not ask for, after they have been counted; None if the gateway asked for
        # nothing.
        self.hidden: HiddenUsage | None = None

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of held and new data: everything up to the end of the last complete event."""
        if self._held:
            data, self._held = self._held + data, b""
        if not self.events and not self._has_cr:
            self._has_cr = _CR_ENDS_LINE.match(data) is not None
        if self._has_cr:
            data = data.replace(b"\r", b"\n")
        if data[-2:] != b"\n\n" and data[-4:] != b"\r\n\r\n":
            lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
            end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
            if len(data) - end <= _HOLD_LIMIT_BYTES:
                data, self._held = data[:end], data[end:]
                if not data:
                    return data
        if self.watcher is not None:
            data = self.watcher.take(data)
        self.events += data.count(b"\n\n") or data.count(b"\r\n\r\n")
        if self._marker is not None:
            self.deltas += data.count(self._marker)
        self._recent.append(data)
        return data if self.hidden is None else self.hidden.take(data)

    def rest(self) -> bytes:
        """Return the held data, at the end of the stream."""
        held, self._held = self._held, b""
        if held:
            self._recent.append(held)
        return held

    def last_documents(self) -> Iterator[dict[str, object]]:
        """Yield the JSON objects of the last few events, latest first; other data is skipped."""
        for line in reversed(self.last_events().split(b"\n")):
            if not line.startswith(b"data:"):
                continue
            try:
                document = orjson.loads(line[5:].strip())
            except orjson.JSONDecodeError:
                continue  # [DONE], or part of an event
            if isinstance(document, dict):
                yield document

    def is_complete(self, endpoint: Endpoint) -> bool:
        """Return whether the event that ends a stream of the endpoint has been passed on.

        Read when the stream breaks off, not for each chunk.
        """
        if (last_types := _LAST_TYPES.get(endpoint)) is not None:
            return any(str(document.get("type")) in last_types for document in self.last_documents())
        lines = self.last_events().split(b"\n")
        return any(line.startswith(b"data:") and line[5:].strip() == b"[DONE]" for line in lines)

    def last_events(self) -> bytes:
        """Return the events of the last few reads, as they came."""
        return b"".join(self._recent)

    def content_chunks(self, endpoint: Endpoint, *, with_usage: bool) -> int:
        """Return how many chunks carried output."""
        if self._marker is not None:
            return self.deltas
        without_content = self.is_complete(endpoint) + with_usage + (endpoint is Endpoint.CHAT)  # [DONE], usage, role
        return max(0, self.events - without_content)


def is_event_stream(data: bytes) -> bool:
    r"""Return whether data can be the beginning of an event stream.

    Examples
    --------
    >>> is_event_stream(b"data: 1\n\n"), is_event_stream(b"<html>")
    (True, False)
    """
    return data.lstrip().startswith(_FIELDS)


def engine_error(data: bytes) -> int:
    r"""Return the code of the first 5xx error among events, although their status was 200; 0 if there is none.

    Examples
    --------
    >>> engine_error(b'data: {"error": {"code": 503}}\n\n')
    503
    """
    if b'"error"' not in data:
        return 0
    for line in data.split(b"\n"):
        if line.startswith(b"data:") and b'"error"' in line and (code := _error_code(line[5:])):
            return code
    return 0


def _error_code(data: bytes) -> int:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return 0
    error = document.get("error") if isinstance(document, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 500 <= code < 600 else 0
