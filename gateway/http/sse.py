"""Watching a stream of server-sent events go by, at about a microsecond a chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import orjson

from policies.features.request import Endpoint

_HOLD_LIMIT_BYTES = 1 << 20
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
# How to find the events that carry output, where not every event does.
_MARKERS = {Endpoint.MESSAGES: b"event: content_block_delta", Endpoint.RESPONSES: b".delta\n"}


class EventStream:
    """Passes whole events on and counts them.

    An event that a read has cut in two is held until its rest comes, so that a stream whose backend dies in the
    middle of one can still end with an error that the client can read.

    Attributes
    ----------
    events
        Events passed on.
    deltas
        Those that carry output, where the endpoint marks them; else 0 (see `steps`).
    size_bytes
        Bytes passed on.
    """

    __slots__ = ("_held", "_marker", "_recent", "_shortest_bytes", "deltas", "events", "size_bytes")

    def __init__(self, endpoint: Endpoint) -> None:
        self._marker = _MARKERS.get(endpoint)
        self._held = b""
        self._recent: deque[bytes] = deque(maxlen=3)  # usage comes in the last event, or the one before [DONE]
        self._shortest_bytes = 1 << 30
        self.events = 0
        self.deltas = 0
        self.size_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Take what was read and return what may go on: all of it, up to the end of the last whole event."""
        if self._held:
            data, self._held = self._held + data, b""
        if data[-2:] != b"\n\n" and data[-4:] != b"\r\n\r\n":
            lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
            end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
            if len(data) - end <= _HOLD_LIMIT_BYTES:
                data, self._held = data[:end], data[end:]
                if not data:
                    return data
        count = data.count(b"\n\n") or data.count(b"\r\n\r\n")
        self.events += count
        if self._marker is not None:
            self.deltas += data.count(self._marker)
        size = len(data)
        self.size_bytes += size
        if count == 1 and size < self._shortest_bytes and not data.startswith(b"data: [DONE]"):
            self._shortest_bytes = size
        self._recent.append(data)
        return data

    def rest(self) -> bytes:
        """Return what is held, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def last_documents(self) -> Iterator[dict[str, object]]:
        """Read the JSON objects of the last few events, latest first; what is no JSON is passed over."""
        for line in reversed(b"".join(self._recent).split(b"\n")):
            if not line.startswith(b"data:"):
                continue
            try:
                document = orjson.loads(line[5:].strip())
            except orjson.JSONDecodeError:
                continue  # [DONE], or the head of an event that began in an earlier read
            if isinstance(document, dict):
                yield document

    def steps(self, endpoint: Endpoint, *, with_usage: bool) -> int:
        """Estimate the engine steps that emitted tokens: one content chunk is one step.

        Parameters
        ----------
        with_usage
            True if the stream ended with an event for the usage alone.
        """
        if self._marker is not None:
            return self.deltas
        others = 1 + with_usage + (endpoint is Endpoint.CHAT)  # [DONE], usage, the role
        return max(0, self.events - others)

    def text_bytes(self) -> int:
        """Estimate the bytes of text in the stream: what the events hold beyond the shortest of them."""
        if not self.events or self._shortest_bytes > self.size_bytes:
            return 0
        return max(0, self.size_bytes - self.events * (self._shortest_bytes - 1))


def is_event_stream(data: bytes) -> bool:
    """Tell whether bytes can be the beginning of an event stream."""
    return data.lstrip().startswith(_FIELDS)


def is_engine_error(data: bytes) -> bool:
    """Tell whether a stream begins with an error of the engine's: status 200 had been sent before it knew."""
    if b'"error"' not in data:
        return False
    line = next((line for line in data.split(b"\n") if line.startswith(b"data:")), b"")
    try:
        document = orjson.loads(line[5:])
    except orjson.JSONDecodeError:
        return False
    error = document.get("error") if isinstance(document, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, int) and code >= 500
