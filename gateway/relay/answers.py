"""Holds an answer back until it is known to be valid.

A stream is passed on from its first complete event, any other answer of an inference endpoint when it is complete.
Until then the request can be retried on another backend. The classes know neither sockets nor backends.
"""

from __future__ import annotations

import json
from typing import Final

import orjson

from backends.http.receiver import HeaderList
from gateway.dialects.ending import InvalidAnswerError, check_whole, given_up_in
from gateway.dialects.sse import EventStream, count_events, is_event_stream
from gateway.dialects.usage import Usage, first_usage, read_other_usage, read_usage
from gateway.http.headers import is_json, media_type
from policies.features.request import Endpoint

MAX_HELD_BYTES: Final = 1 << 20
"""Size up to which an answer in one piece is held; a longer one is passed on before its end has arrived."""


_TAIL_BYTES: Final = 1 << 16
_LINES: Final = frozenset({b"application/x-ndjson", b"application/ndjson", b"application/jsonl"})
_DECODER: Final = json.JSONDecoder()


class PassThrough:
    """An answer that is passed on as it arrives; the base class of the others."""

    usage: Usage | None = None  # usage as reported by the engine; None before the end
    events: EventStream | None = None  # the events of a stream; None for other answers
    error_status = 0  # status of an error in place of the answer, or among its events; 0 without one
    unread_bytes = 0  # bytes passed on without reading their usage

    def note_error(self, status: int) -> None:
        """Record an error among the events of a stream."""
        self.error_status = status

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of held and new data."""
        return data

    def end(self) -> bytes:
        """Return the rest of the answer, at its end; raises as `feed` does."""
        return b""


class MeteredAnswer(PassThrough):
    r"""An answer that is passed on as it arrives; enough of its end is kept to read its usage.

    The end of a long answer of an inference endpoint is held until it is known to be complete.

    Examples
    --------
    >>> answer = MeteredAnswer("json")
    >>> answer.feed(b'{"results": [], '), answer.feed(b'"usage": {"total_tokens": 7}}'), answer.end()
    (b'{"results": [], ', b'"usage": {"total_tokens": 7}}', b'')
    >>> answer.usage.prompt_tokens
    7
    """

    def __init__(self, kind: str, *, is_checked: bool = False) -> None:
        self.events_passed = 0  # number of events of a stream
        # `json`, `stream` (server-sent events), `lines` (of JSON), or `opaque` if its usage cannot be read.
        self._kind = kind
        self._is_checked = is_checked and kind == "json"
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Return the data, and keep its end."""
        self.unread_bytes += len(data)
        if self._is_checked:
            data = self._tail + data
            data, self._tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
            return data
        if self._kind != "opaque":
            self._tail = _tail_of(self._tail, data)
        if self._kind == "stream":
            self.events_passed += count_events(data)
        return data

    def end(self) -> bytes:
        """Read the usage, and return what was held back."""
        self.read_usage()
        rest = self._tail.rstrip()
        if self._is_checked:
            if not rest.endswith(b"}") or given_up_in(rest):
                raise InvalidAnswerError("broken", "ended the answer before it was whole")
            return self._tail
        last = rest.rpartition(b"\n")[2] if self._kind in {"stream", "lines"} else b""
        if last.startswith((b"data: {", b"data:{", b"{")) and not last.endswith(b"}"):
            raise InvalidAnswerError("broken", "ended in the middle of an event")
        return b""

    def read_usage(self) -> None:
        """Read the usage in what has been passed on."""
        if self._kind == "stream":
            self.usage = _usage_of_events(self._tail)
        elif self._kind == "json":
            self.usage = _usage_of_json(self._tail, is_whole=self.unread_bytes <= _TAIL_BYTES)
        if self.usage is not None:
            self.unread_bytes = 0


def _tail_of(tail: bytes, data: bytes) -> bytes:
    return data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (tail + data)[-_TAIL_BYTES:]


def _usage_of_events(tail: bytes) -> Usage | None:
    for line in reversed(tail.split(b"\n")):
        if b'"usage"' in line and line.startswith(b"data:"):
            try:
                usage = read_other_usage(orjson.loads(line[5:].strip()))
            except orjson.JSONDecodeError:
                continue
            if usage is not None:
                return usage
    return None


def _usage_of_json(tail: bytes, *, is_whole: bool) -> Usage | None:
    """Return the usage in a document, or near its end; texts cannot pass for it, since their quotes are escaped."""
    try:
        if is_whole:
            return read_other_usage(orjson.loads(tail))
        _, found, rest = tail.rpartition(b'"usage"')
        value, _ = _DECODER.raw_decode(rest.decode("utf-8", "replace").lstrip(" \r\n\t:"))
        return read_usage({"usage": value}) if found else None
    except (ValueError, RecursionError):
        return None


class WholeAnswer(PassThrough):
    r"""An answer in one piece, which is held until it is complete.

    Examples
    --------
    >>> answer = WholeAnswer(Endpoint.EMBEDDINGS, is_checked=True)
    >>> answer.feed(b'{"data":'), answer.feed(b"[]}")
    (b'', b'')
    >>> answer.end()
    b'{"data":[]}'
    """

    def __init__(self, endpoint: Endpoint, items: int = 0, *, is_checked: bool) -> None:
        self._endpoint = endpoint
        self._items = items  # inputs that an answer of embeddings must cover; 0 for others
        # body, document: the complete answer, and its JSON if checked; None before the end, or if it is too long.
        self.body: bytes | None = None
        self.document: object = None
        self._is_checked = is_checked  # whether it must be JSON; errors of the engine need not be
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._metered: MeteredAnswer | None = None  # handles an answer too long to hold

    def feed(self, data: bytes) -> bytes:
        """Hold the data, or pass everything on if it is too long."""
        self._size_bytes += len(data)
        if self._metered is not None:
            return self._metered.feed(data)
        self._parts.append(data)
        if self._size_bytes <= MAX_HELD_BYTES:
            return b""
        data, self._parts = b"".join(self._parts), []
        self._metered = MeteredAnswer("json" if self._is_checked else "opaque", is_checked=True)
        return self._metered.feed(data)

    def end(self) -> bytes:
        """Check the answer and return it."""
        if self._metered is not None:
            rest = self._metered.end()
            self.usage, self.unread_bytes = self._metered.usage, self._metered.unread_bytes
            return rest
        body = b"".join(self._parts)
        self.take(body)
        return body

    def take(self, body: bytes) -> None:
        """Take the complete answer."""
        if self._is_checked:
            try:
                self.document = orjson.loads(body)
            except orjson.JSONDecodeError:
                raise InvalidAnswerError("garbage", "answered with something that is not JSON") from None
            self.error_status = check_whole(self._endpoint, self.document, self._items)
            self.usage = read_usage(self.document)
        self.body = body


class StreamAnswer(PassThrough):
    """A stream of server-sent events, which is held until its first event is complete."""

    def __init__(self, endpoint: Endpoint, *, has_choices: bool) -> None:
        self._events = self.events = EventStream(endpoint, has_choices=has_choices)
        self._has_begun = False

    def feed(self, data: bytes) -> bytes:
        """Return the complete events."""
        data = self._events.feed(data)
        if not self._has_begun and (begun := data or self._events.withheld):
            if not is_event_stream(begun):
                raise InvalidAnswerError("garbage", "answered with something other than events")
            self._has_begun = True
            self.error_status = self._events.ending.error_status
        return data

    def end(self) -> bytes:
        """Return what follows the last complete event."""
        rest = self._events.rest()
        if not (rest or self._has_begun):
            raise InvalidAnswerError("broken", "ended a stream without an event")
        self.usage = first_usage(self._events.last_documents())
        self.error_status = self._events.ending.error_status
        return rest


def answer_for(endpoint: Endpoint, status: int, headers: HeaderList, items: int, *, has_choices: bool) -> PassThrough:
    """Return the handler of an answer, by its head."""
    by_name = dict(headers)
    content_type = by_name.get(b"content-type", b"")
    is_encoded = b"content-encoding" in by_name
    kind = media_type(content_type)
    if endpoint is Endpoint.OTHER:
        return MeteredAnswer("opaque" if is_encoded else _kind_of(kind))
    if status == 200 and kind == b"text/event-stream":
        return MeteredAnswer("opaque") if is_encoded else StreamAnswer(endpoint, has_choices=has_choices)
    if status == 200 and not is_json(kind):
        if kind == b"application/octet-stream" and endpoint is Endpoint.EMBEDDINGS:  # vLLM's `encoding_format: bytes`
            return MeteredAnswer("opaque")
        received = content_type[:100].decode("latin-1") or "no content type"
        raise InvalidAnswerError("garbage", f"answered with {received}, not JSON or an event stream")
    length = by_name.get(b"content-length", b"")
    is_long = length.isdigit() and int(length) > MAX_HELD_BYTES
    if is_encoded or is_long:
        return MeteredAnswer("opaque" if is_encoded else _kind_of(kind), is_checked=status == 200)
    return WholeAnswer(endpoint, items, is_checked=status == 200)


def _kind_of(media: bytes) -> str:
    if media == b"text/event-stream":
        return "stream"
    if media in _LINES:
        return "lines"
    return "json" if is_json(media) else "opaque"
