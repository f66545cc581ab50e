"""Checks that an answer declares itself complete.

An engine that is paused, put to sleep or stopped ends its requests with status 200: with a finish reason of its own
(`abort`), with none, or with an error in place of an answer.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Final

import orjson

from gateway.dialects.transcript import dicts
from policies.features.request import Endpoint

_MESSAGES: Final = Endpoint.MESSAGES
_RESPONSES: Final = Endpoint.RESPONSES
_EMBEDDINGS: Final = Endpoint.EMBEDDINGS
_USUAL: Final = frozenset({"stop", "length", "tool_calls"})
_GIVEN_UP: Final = ("abort", "cancel", "error", "fail")
"""Prefixes of finish reasons with which an engine gives up; all others count as an end, unknown ones too."""
_PARTS: Final = {
    **dict.fromkeys((Endpoint.CHAT, Endpoint.COMPLETIONS), "choices"),
    _MESSAGES: "content",
    _RESPONSES: "output",
    _EMBEDDINGS: "data",
}
"""The field with the list of choices, or of other parts, in the answers of each endpoint."""
_OF_CLIENTS: Final = ("invalid", "badrequest", "notfound", "permission", "authentication")
_OF_LOAD: Final = ("overload", "unavailable", "ratelimit", "toomany")
"""Parts of the type or code of an error without a status, if the client caused it, or the engine is overloaded."""
_NAMED: Final = re.compile(rb'"(?:finish|stop)_reason":\s*"(?:%b)' % "|".join(_GIVEN_UP).encode(), re.IGNORECASE)
_BOUNDARY: Final = re.compile(rb"\n\n|\r\n\r\n")
BUSY: Final = 429


class InvalidAnswerError(Exception):
    """An answer is not what was asked for."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind  # the label value in metrics: `garbage`, or `broken` if it lacks its end


def given_up_in(document: bytes) -> bool:
    """Return whether the end of a long document has a finish reason with which the engine gave up."""
    return _NAMED.search(document) is not None


def check_whole(endpoint: Endpoint, document: object, items: int = 0) -> int:
    """Check a complete answer of status 200; return the status of a client error in its place, or 0.

    Examples
    --------
    >>> check_whole(Endpoint.CHAT, {"choices": [{"message": {}, "finish_reason": "stop"}]})
    0
    >>> check_whole(Endpoint.EMBEDDINGS, {"data": [{}, {}]}, items=3)
    Traceback (most recent call last):
    gateway.dialects.ending.InvalidAnswerError: answered 2 of 3 inputs
    """
    if not isinstance(document, dict):
        raise InvalidAnswerError("garbage", "answered with JSON that is no object")
    name = _PARTS[endpoint]
    parts = document.get(name)
    if document.get("error") or not isinstance(parts, list):
        status = error_status(document)
        if not status or is_of_engine(status):
            raise InvalidAnswerError("garbage", "answered 200 with an error" if status else f"answered without {name}")
        return status
    if name == "choices":
        if not parts:
            raise InvalidAnswerError("garbage", "answered without a choice")
        for choice in parts:
            if not isinstance(choice, dict) or not ("message" in choice or "text" in choice):
                raise InvalidAnswerError("garbage", "answered with a choice that has no text")
            if (reason := choice.get("finish_reason", "stop")) != "stop":
                _check_reason(reason)
    elif endpoint is _MESSAGES:
        _check_reason(document.get("stop_reason"))
    elif endpoint is _RESPONSES:
        _check_response(document)
    elif len(parts) < items:
        raise InvalidAnswerError("broken", f"answered {len(parts)} of {items} inputs")
    return 0


def _check_reason(reason: object) -> None:
    if reason is None:
        raise InvalidAnswerError("broken", "ended the answer without a reason")
    if isinstance(reason, str) and reason not in _USUAL and reason.lower().startswith(_GIVEN_UP):
        raise InvalidAnswerError("broken", f"gave up the answer ({reason[:40]!r})")


def _check_response(response: dict[str, Any]) -> None:
    details = response.get("incomplete_details")
    _check_reason(response.get("status") or "")
    _check_reason((details.get("reason") if isinstance(details, dict) else "") or "")


def error_status(document: dict[str, Any]) -> int:
    """Return the status of an error in place of an answer, or among its events; 0 without one.

    Examples
    --------
    >>> error_status({"error": {"code": 400}}), error_status({"error": "out of memory"}), error_status({"error": None})
    (400, 500, 0)
    >>> error_status({"type": "error", "error": {"type": "overloaded_error"}})
    503
    """
    error = document.get("error")
    if document.get("object") == "error" or (document.get("type") == "error" and not error):
        error = document
    elif document.get("type") == "response.failed":
        response = document.get("response")
        error = (response.get("error") if isinstance(response, dict) else None) or document
    if not error:
        return 0
    said = error if isinstance(error, dict) else {}
    code = said.get("code")
    if isinstance(code, str) and code.isdecimal() and len(code) == 3:
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return code
    kind = f"{said.get('type')} {code}".lower().replace("_", "").replace(" ", "")
    if any(mark in kind for mark in _OF_LOAD):
        return 503
    return 400 if any(mark in kind for mark in _OF_CLIENTS) else 500


def is_of_engine(status: int) -> bool:
    """Return whether an error of this status is the engine's fault, not the client's."""
    return status >= 500 or status == BUSY


def events_of(data: bytes) -> list[bytes]:
    r"""Split bytes of a stream into events, each including its end.

    Examples
    --------
    >>> events_of(b"data: 1\n\ndata: 2\r\n\r\ndata")
    [b'data: 1\n\n', b'data: 2\r\n\r\n', b'data']
    """
    ends = [boundary.end() for boundary in _BOUNDARY.finditer(data)]
    return [data[begin:end] for begin, end in pairwise([0, *ends, len(data)]) if begin < end]


class StreamEnding:
    r"""What the events of one stream say about its end.

    Examples
    --------
    >>> ending = StreamEnding(Endpoint.CHAT)
    >>> ending.take(b'data: {"choices": [{"index": 0, "finish_reason": null}]}\n\n'), ending.take(b"data: [DONE]\n\n")
    (True, False)
    >>> ending.flaw
    'ended the stream without a reason'
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._begun: set[int] = set()  # indices of choices that have an event
        self._ended: set[int] = set()  # those of them that have ended
        self.has_gaps = False  # whether an event was too long to read: it may contain anything
        self.is_complete = False  # whether it has ended as it should
        self.error_status = 0  # status of an error among its events; 0 without one
        self.flaw = ""  # how the engine gave up, if that would pass for an end; else empty

    def take(self, event: bytes) -> bool:
        """Read an event; return whether to pass it on, which is False if the engine gives up."""
        if self.error_status:
            return True
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                return self._end()
            try:
                document = orjson.loads(value)
            except orjson.JSONDecodeError:
                continue
            if isinstance(document, dict) and not self._read(document):
                return False
        return True

    def _read(self, document: dict[str, Any]) -> bool:
        self.error_status = error_status(document)
        if self.error_status:
            self.is_complete = not is_of_engine(self.error_status)
            return self.is_complete
        try:
            if self._endpoint is _RESPONSES:
                if document.get("type") in ("response.completed", "response.incomplete"):
                    if isinstance(response := document.get("response"), dict):
                        _check_response(response)
                    self.is_complete = True
            elif self._endpoint is _MESSAGES:
                delta = document.get("delta")
                if isinstance(delta, dict) and (reason := delta.get("stop_reason")) is not None:
                    _check_reason(reason)
                    self._ended.add(0)
                elif document.get("type") == "message_stop":
                    return self._end()
            else:
                for choice in dicts(document.get("choices")):
                    reason, index = choice.get("finish_reason"), choice.get("index")
                    number = index if isinstance(index, int) else 0
                    self._begun.add(number)
                    if reason is not None:
                        _check_reason(reason)
                        self._ended.add(number)
        except InvalidAnswerError as error:
            self.flaw = str(error)
            return False
        return True

    def _end(self) -> bool:
        is_ended = bool(self._ended) and self._begun <= self._ended
        self.is_complete = is_ended or self.has_gaps or self._endpoint is _EMBEDDINGS
        if not self.is_complete:
            self.flaw = "ended the stream without a reason"
        return self.is_complete
