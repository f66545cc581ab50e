"""Usage that the gateway asks an engine for, and that the client, who did not, does not get.

vLLM counts the tokens of a stream for those who ask (`stream_options.include_usage`), which SDKs do not by default. The
gateway asks in their place, and takes out again what that adds: the event with the usage. It also puts back what that
removes: vLLM names its `system_fingerprint` in the last event, which otherwise is the one with the finish reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.json_body import insert_field, set_field

_OPTIONS: Final[dict[str, object]] = {"include_usage": True}
_FIELD: Final = b'"stream_options":{"include_usage":true}'
_USAGE: Final = b'"usage":'
_NO_USAGE: Final = re.compile(rb',\s*"usage":\s*null')
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')
_FINISH: Final = b'"finish_reason":"'
_FINGERPRINT: Final = re.compile(rb',"system_fingerprint":"[^"\\]*"')


def options_to_ask(document: Mapping[str, Any]) -> Mapping[str, object] | None:
    """Return the `stream_options` with which a streamed request asks for usage; None if it does, or cannot.

    Examples
    --------
    >>> options_to_ask({"stream": True, "stream_options": {"include_usage": False, "x": 1}})
    {'include_usage': True, 'x': 1}
    >>> options_to_ask({"stream": True, "stream_options": {"include_usage": True}}) is None
    True
    """
    if document.get("stream") is not True:
        return None
    if "stream_options" not in document:
        return _OPTIONS
    given = document["stream_options"]
    if given is None:
        return {"include_usage": True}
    if not isinstance(given, dict) or not (given.get("include_usage") is None or given["include_usage"] is False):
        return None
    others = {name: value for name, value in given.items() if name not in _OWN}
    return {"include_usage": True, **others}


_OWN: Final = frozenset({"include_usage", "continuous_usage_stats"})  # the second has no effect without the first


def asking(body: bytes, options: Mapping[str, object]) -> bytes:
    """Return the body of a request that asks for usage, with the result of `options_to_ask`."""
    return insert_field(body, _FIELD) if options is _OPTIONS else set_field(body, "stream_options", options)


class StreamHabits:
    r"""What an engine's streams tell unasked, as one of them has shown.

    An engine is asked from its second stream on: with `--enable-force-include-usage` it tells the usage by itself, and
    clients are used to it.

    Examples
    --------
    >>> habits = StreamHabits()
    >>> habits.learn(b'data: {"choices":[{"finish_reason":"stop"}],"system_fingerprint":"v1"}\n\n')
    >>> habits.may_ask, habits.fingerprint
    (True, b',"system_fingerprint":"v1"')
    """

    def __init__(self) -> None:
        self.may_ask = False  # whether the engine tells the usage only if it is asked, and can be
        self.refuses = False  # whether it has refused to be asked
        self.fingerprint = b""  # the field that it adds to the event with the finish reason; empty if it adds none
        self.has_nulls = False

    def learn(self, events: bytes) -> None:
        """Learn from the last events of a complete stream that did not ask for usage."""
        self.has_nulls = _NO_USAGE.search(events) is not None
        self.may_ask = not self.refuses and _USAGE not in _NO_USAGE.sub(b"", events)
        last = events.rfind(_FINISH)
        found = None if last < 0 else _FINGERPRINT.search(events, last, _end_of(events, last))
        self.fingerprint = b"" if found is None else found[0]

    def note_refusal(self) -> None:
        """Ask the engine no more: it has refused a request that it served when it was not asked."""
        self.refuses, self.may_ask = True, False


class HiddenUsage:
    r"""Makes the events of a stream that was asked for its usage those of one that was not.

    Examples
    --------
    >>> habits = StreamHabits()
    >>> habits.fingerprint = b',"system_fingerprint":"v1"'
    >>> hidden = HiddenUsage(habits)
    >>> hidden.take(b'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: {"choices":[],"usage":{"x":1}}\n\n')
    b'data: {"choices":[{"finish_reason":"stop"}],"system_fingerprint":"v1"}\n\n'
    """

    def __init__(self, habits: StreamHabits) -> None:
        self._habits = habits
        self._is_told = False

    def take(self, data: bytes) -> bytes:
        """Return what the client gets of complete events."""
        if _USAGE in data and not self._is_told:
            data = self._without_usage(data)
        if _FINISH in data and self._habits.fingerprint:
            data = self._with_fingerprint(data)
        return data

    def _without_usage(self, data: bytes) -> bytes:
        if _NO_USAGE.search(data) is not None:
            if self._habits.has_nulls:
                return data
            data = _NO_USAGE.sub(b"", data)
        while (at := data.find(_USAGE)) >= 0:
            start, end = _start_of(data, at), _end_of(data, at)
            if _NO_CHOICES.search(data, start, end) is None:  # the engine tells it in all events, asked or not
                self._is_told, self._habits.may_ask = True, False
                break
            if self._habits.fingerprint and (found := _FINGERPRINT.search(data, start, end)) is not None:
                self._habits.fingerprint = found[0]
            data = data[:start] + data[end:]
        return data

    def _with_fingerprint(self, data: bytes) -> bytes:
        at = data.find(_FINISH)
        while at >= 0:
            end = _end_of(data, at)
            last = data.rfind(b"}", at, end)
            if last >= 0 and _FINGERPRINT.search(data, at, end) is None:
                data = data[:last] + self._habits.fingerprint + data[last:]
                end += len(self._habits.fingerprint)
            at = data.find(_FINISH, end)
        return data


def _start_of(data: bytes, at: int) -> int:
    """Return where the event begins that has a byte at `at`."""
    lf, crlf = data.rfind(b"\n\n", 0, at), data.rfind(b"\r\n\r\n", 0, at)
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _end_of(data: bytes, at: int) -> int:
    """Return where the event ends that has a byte at `at`, after its empty line."""
    lf, crlf = data.find(b"\n\n", at), data.find(b"\r\n\r\n", at)
    if crlf >= 0 and (lf < 0 or crlf < lf):
        return crlf + 4
    return lf + 2 if lf >= 0 else len(data)
