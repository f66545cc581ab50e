"""Inspection of a stream of server-sent events as it is relayed, at about a microsecond per chunk."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

import orjson

from gateway.dialects.asked_usage import USAGE_FIELD, StreamHabits
from gateway.dialects.ending import StreamEnding, events_of
from policies.features.request import Endpoint

_HOLD_LIMIT_BYTES: Final = 1 << 20
_LF: Final = 10
_END: Final = re.compile(rb"\n\n|\r\n\r\n|\r\r")
"""The end of an event, with any line ending."""
_CR_ENDS_LINE: Final = re.compile(rb"[^\r\n]*\r[^\n]")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
# Marks the events that carry output, for endpoints where not every event does.
_MARKERS: Final = {Endpoint.MESSAGES: b"event: content_block_delta", Endpoint.RESPONSES: b".delta\n"}
# Marks the events that concern the end, for these endpoints.
_OF_THE_END: Final = {
    Endpoint.MESSAGES: (b'"message_', b'"error"'),
    Endpoint.RESPONSES: (b'"response.completed"', b'"response.incomplete"', b'"response.failed"', b'"error"'),
}
# Other endpoints: part of each event that does not concern the end. No text has it, since quotes are escaped there.
_GOES_ON: Final = b'"finish_reason":null'
_GOES_ON_SPACED: Final = b'"finish_reason": null'


class EventWatcher(Protocol):
    """Sees the complete events of a stream before its client does."""

    def take(self, data: bytes) -> bytes:
        """Return what the client gets in place of these complete events."""


class EventStream:
    r"""Passes on complete events and counts them.

    An event split over two reads is held until its end arrives: if the backend fails within an event, the stream can
    still end with an error event that the client can read. Once the engine gives up the stream, events are withheld.

    Examples
    --------
    >>> stream = EventStream(Endpoint.COMPLETIONS)
    >>> stream.feed(b"data: 1\n\ndata:")
    b'data: 1\n\n'
    >>> stream.feed(b" 2\n\n"), stream.events
    (b'data: 2\n\n', 2)
    >>> stream.feed(b"data: [DONE]\n\n"), stream.ending.flaw
    (b'', 'ended the stream without a reason')
    """

    def __init__(self, endpoint: Endpoint, *, has_choices: bool = False) -> None:
        self._has_choices = has_choices  # whether several are requested, each of which must end
        self._marker = _MARKERS.get(endpoint)
        self._of_the_end: tuple[bytes, ...] = _OF_THE_END.get(endpoint, ())
        # Marks events that need no reading, since they do not concern the end; empty if all are read.
        self._goes_on = b"" if self._of_the_end or has_choices else _GOES_ON
        self.ending = StreamEnding(endpoint)
        self.withheld = b""  # events since the engine gave up the stream; empty if it has not
        self._held = bytearray()
        self._has_cr = False  # line ends; passed on as LF
        self._recent: deque[bytes] = deque(maxlen=3)  # usage is in the last event, or the one before [DONE]
        self.events = 0  # events passed on
        self.deltas = 0  # events that carry output, if the endpoint marks them; else 0 (see `content_chunks`)
        self.watcher: EventWatcher | None = None  # sees the events before the client does
        # Hides the usage after it has been read; None if the gateway did not ask for it.
        self.habits: StreamHabits | None = None

    def feed(self, data: bytes) -> bytes:
        """Return held and new data up to the end of the last complete event."""
        if self._held and not (data := self._joined(data)):
            return data
        if self._has_cr or not self.events:
            data = self._with_line_feeds(data)
        is_one = _is_one_event(data)
        if not is_one and data[-2:] != b"\n\n" and data[-4:] != b"\r\n\r\n":
            lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
            end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
            if len(data) - end <= _HOLD_LIMIT_BYTES:
                data, self._held = data[:end], bytearray(data[end:])
                if not data:
                    return data
            else:
                self.ending.has_gaps = True
        events = 1 if is_one else count_events(data)
        # Search from the end, since an event has it there.
        goes_on = data.rfind(self._goes_on) > 0 if is_one and self._goes_on else data.count(self._goes_on) == events
        if not goes_on:
            data = self._read_ending(data)
            if not data:
                return data
            events = count_events(data)
        if self.watcher is not None:
            data = self.watcher.take(data)
        self.events += events
        if self._marker is not None:
            self.deltas += data.count(self._marker)
        self._recent.append(data)
        if self.habits is None or (goes_on and data.find(USAGE_FIELD) < 0):  # faster than `in`
            return data
        return self.habits.hide(data)

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Return data with LF for CR, if that ends the lines of the stream."""
        self._has_cr = self._has_cr or _CR_ENDS_LINE.match(data) is not None
        return data.replace(b"\r", b"\n") if self._has_cr else data

    def _joined(self, data: bytes) -> bytes:
        """Return held and new data; nothing while they have no complete event, so that reads do not copy them."""
        if self._has_cr:
            data = data.replace(b"\r", b"\n")
        end = self._held[-3:] + data
        self._held += data
        if _END.search(end) is None and len(self._held) <= _HOLD_LIMIT_BYTES:
            return b""
        joined, self._held = bytes(self._held), bytearray()
        return joined

    def _read_ending(self, data: bytes) -> bytes:
        """Return the events before the engine gives up the stream, if it does; withhold the others."""
        if self._of_the_end and not self._says_of_the_end(data):
            return data
        if not self.events and self._goes_on and _GOES_ON_SPACED in data:
            self._goes_on = _GOES_ON_SPACED
        at = 0
        for event in events_of(data):
            # Read each event by itself: how many arrive in one read is chance.
            if self._of_the_end:
                goes_on = not self._says_of_the_end(event)
            else:
                goes_on = not self._has_choices and (_GOES_ON in event or _GOES_ON_SPACED in event)
            if not goes_on and not self.ending.take(event):
                self.withheld = data[at:]
                return data[:at]
            at += len(event)
        return data

    def _says_of_the_end(self, data: bytes) -> bool:
        return any(mark in data for mark in self._of_the_end)

    def pass_withheld(self) -> bytes:
        """Return what was withheld, to send to the client: an error, which ends the stream."""
        withheld, self.withheld = self.withheld, b""
        self.ending.is_complete = True
        return withheld

    def watch(self, watcher: EventWatcher) -> None:
        """Show the events to a watcher before the client."""
        self.watcher = watcher

    def hide_usage(self, habits: StreamHabits) -> None:
        """Hide the usage from the client, who did not ask for it."""
        self.habits = habits

    def restart(self) -> None:
        """Drop what the client has not received: another engine resumes the stream."""
        self.withheld, self._held = b"", bytearray()
        self.watcher, self.ending.error_status, self.ending.flaw = None, 0, ""

    def rest(self) -> bytes:
        """Return the held data, at the end of the stream."""
        held, self._held = bytes(self._held), bytearray()
        if held:
            if not self.events:
                held = self._with_line_feeds(held)
            held = self._read_ending(held)
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

    def last_events(self) -> bytes:
        """Return the events of the last few reads."""
        return b"".join(self._recent)

    def content_chunks(self, endpoint: Endpoint, *, with_usage: bool) -> int:
        """Return how many chunks carried output."""
        if self._marker is not None:
            return self.deltas
        without_content = self.ending.is_complete + with_usage + (endpoint is Endpoint.CHAT)  # [DONE], usage, role
        return max(0, self.events - without_content)


def count_events(data: bytes) -> int:
    r"""Return the number of complete events; a single line is recognized faster than counted.

    Examples
    --------
    >>> count_events(b"data: 1\n\n"), count_events(b"event: a\ndata: 1\n\n:\n\n"), count_events(b"data: 1\r\n\r\n:\n\n")
    (1, 2, 2)
    """
    if _is_one_event(data):
        return 1
    return data.count(b"\n\n") + data.count(b"\r\n\r\n")


def _is_one_event(data: bytes) -> bool:
    return data.find(b"\n") == len(data) - 2 and data[-1] == _LF


def is_event_stream(data: bytes) -> bool:
    r"""Return whether data can be the beginning of an event stream.

    Examples
    --------
    >>> is_event_stream(b"data: 1\n\n"), is_event_stream(b"<html>")
    (True, False)
    """
    return data.lstrip().startswith(_FIELDS)
