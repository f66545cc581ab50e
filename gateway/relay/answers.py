"""How an answer is held back and passed on: only once it is known to be valid.

A stream is passed on after its first complete event, any other answer of an inference endpoint when it is complete.
Until then the request can be retried on another backend. The classes know neither sockets nor backends.
"""

from __future__ import annotations

from typing import Final

import orjson

from backends.http.client import HeaderList
from gateway.http.headers import is_json, media_type
from gateway.http.sse import EventStream, engine_error, is_event_stream
from gateway.http.usage import Usage, read_usage
from policies.features.request import Endpoint

MAX_HELD_BYTES: Final = 1 << 20
"""Size up to which an answer in one piece is held; a longer one is passed on before its end is known."""


class InvalidAnswerError(Exception):
    """An answer is not what was asked for.

    Parameters
    ----------
    kind
        The label value in metrics: `garbage`, or `broken` if it lacks its end.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class PassThrough:
    """An answer that is passed on as it comes; the base class of the others.

    Attributes
    ----------
    usage
        Usage as the engine reported it; None before the end and without a report.
    events
        The events of a stream; None for other answers.
    error_status
        The code of the 5xx error with which a stream begins; 0 without one.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.events: EventStream | None = None
        self.error_status = 0

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of held and new data.

        Raises
        ------
        InvalidAnswerError
            If the answer turns out to be invalid; nothing of it has been passed on.
        """
        return data

    def end(self) -> bytes:
        """Return the rest of the answer, at its end; raises as `feed` does."""
        return b""


class WholeAnswer(PassThrough):
    r"""An answer in one piece, which is held until it is complete.

    Parameters
    ----------
    is_checked
        Whether it must be JSON; errors of the engine need not be.

    Attributes
    ----------
    body, document
        The complete answer, and its JSON if it was checked; None before the end and if it was too long to be held.

    Examples
    --------
    >>> answer = WholeAnswer(is_checked=True)
    >>> answer.feed(b'{"a":'), answer.feed(b"1}")
    (b'', b'')
    >>> answer.end()
    b'{"a":1}'
    """

    def __init__(self, *, is_checked: bool) -> None:
        super().__init__()
        self.body: bytes | None = None
        self.document: object = None
        self._is_checked = is_checked
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Hold the data, or pass everything on if it is too long."""
        self._size_bytes += len(data)
        if self._size_bytes - len(data) > MAX_HELD_BYTES:
            return data
        self._parts.append(data)
        if self._size_bytes <= MAX_HELD_BYTES:
            return b""
        data, self._parts = b"".join(self._parts), []
        return data

    def end(self) -> bytes:
        """Return the answer, once it has been checked."""
        if self._size_bytes > MAX_HELD_BYTES:
            return b""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if self._is_checked:
            try:
                self.document = orjson.loads(body)
            except orjson.JSONDecodeError:
                raise InvalidAnswerError("garbage", "answered with something that is not JSON") from None
            self.usage = read_usage(self.document)
        self.body = body
        return body


class StreamAnswer(PassThrough):
    """A stream of server-sent events, which is held until its first event is complete."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._events = self.events = EventStream(endpoint)
        self._has_begun = False

    def feed(self, data: bytes) -> bytes:
        """Return the complete events."""
        data = self._events.feed(data)
        if data and not self._has_begun:
            if not is_event_stream(data):
                raise InvalidAnswerError("garbage", "answered with something other than events")
            self._has_begun = True
            self.error_status = engine_error(data)
        return data

    def end(self) -> bytes:
        """Return what follows the last complete event."""
        rest = self._events.rest()
        if not (rest or self._has_begun):
            raise InvalidAnswerError("broken", "ended a stream without an event")
        self.usage = next(filter(None, map(read_usage, self._events.last_documents())), None)
        return rest


def answer_for(endpoint: Endpoint, status: int, headers: HeaderList, request: bytes) -> PassThrough:
    """Return how to handle the answer with a head.

    Parameters
    ----------
    request
        The body of the request, which may ask for something other than JSON or an event stream.

    Raises
    ------
    InvalidAnswerError
        If an inference endpoint answers with something that was not asked for.
    """
    if endpoint is Endpoint.OTHER:
        return PassThrough()
    by_name = dict(headers)
    content_type = by_name.get(b"content-type", b"")
    is_encoded = b"content-encoding" in by_name
    kind = media_type(content_type)
    if status == 200 and kind == b"text/event-stream":
        return PassThrough() if is_encoded else StreamAnswer(endpoint)
    if status == 200 and not is_json(kind):
        if kind == b"application/octet-stream" and endpoint is Endpoint.EMBEDDINGS and _asks_for_bytes(request):
            return PassThrough()
        received = content_type[:100].decode("latin-1") or "no content type"
        raise InvalidAnswerError("garbage", f"answered with {received}, not JSON or an event stream")
    length = by_name.get(b"content-length", b"")
    is_long = length.isdigit() and int(length) > MAX_HELD_BYTES
    return PassThrough() if is_encoded or is_long else WholeAnswer(is_checked=status == 200)


def _asks_for_bytes(request: bytes) -> bool:
    """Return whether a request for embeddings asks for them as raw bytes, which is vLLM's extension of the API."""
    try:
        document = orjson.loads(request)
    except orjson.JSONDecodeError:
        return False
    return isinstance(document, dict) and document.get("encoding_format") in ("bytes", "bytes_only")
