"""Requests usage from engines for streams whose clients did not, and hides it from these clients.

vLLM reports a stream's tokens only on request (`stream_options.include_usage`), which SDKs do not make by default. The
gateway makes it for them, and removes what that adds: the event with the usage, or the field, if an engine reports it
in other events. It also restores what that moves: vLLM sends its `system_fingerprint` in the last event, which without
usage is the one with the finish reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.ending import events_of
from gateway.dialects.json_body import insert_field, set_field

USAGE: Final = b"stream_options"
IDS: Final = b"return_token_ids"
"""Parameters that the gateway adds to requests for streams, if engines accept them."""
_OPTIONS: Final[dict[str, object]] = {"include_usage": True}
_FIELD: Final = b'"stream_options":{"include_usage":true}'
USAGE_FIELD: Final = b'"usage":'
_NO_USAGE: Final = re.compile(rb',\s*"usage":\s*null')
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')
_FINISH: Final = b'"finish_reason":"'
_DECODER: Final = json.JSONDecoder()
_FINGERPRINT: Final = re.compile(rb',"system_fingerprint":"[^"\\]*"')


def options_to_ask(document: Mapping[str, Any]) -> Mapping[str, object] | None:
    """Return the `stream_options` that make a request for a stream ask for usage; None if it does so, or cannot.

    Examples
    --------
    >>> options_to_ask({"stream": True, "stream_options": {"include_usage": False, "x": 1}})
    {'include_usage': True, 'x': 1}
    >>> options_to_ask({"stream": True, "stream_options": {"include_usage": True}}) is None
    True
    """
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
    r"""How an engine writes streams, learned from its first complete one and assumed for its life.

    An engine is asked from its second stream on: with `--enable-force-include-usage` it reports usage unasked, and
    clients expect it.

    Examples
    --------
    >>> habits = StreamHabits()
    >>> habits.learn(b'data: {"choices":[{"finish_reason":"stop"}],"system_fingerprint":"v1"}\n\n')
    >>> habits.may_ask, habits.fingerprint
    (True, b',"system_fingerprint":"v1"')
    """

    def __init__(self) -> None:
        self._is_known = False
        self.may_ask = False  # whether the engine reports usage only if asked
        self.fingerprint = b""  # the field that it adds to the event with the finish reason; empty if it adds none
        self.has_nulls = False
        self.declined: frozenset[bytes] = frozenset()  # parameters that it rejects or ignores

    def decline(self, *parameters: bytes) -> None:
        """Record parameters that the engine rejects or ignores."""
        self.declined = self.declined.union(parameters)

    def learn(self, events: bytes) -> None:
        """Learn from the last events of the first complete stream that did not ask for usage."""
        if self._is_known:
            return
        self._is_known = True
        self.has_nulls = _NO_USAGE.search(events) is not None
        self.may_ask = USAGE_FIELD not in _NO_USAGE.sub(b"", events)
        found = [_FINGERPRINT.search(event) for event in events_of(events) if _FINISH in event]
        self.fingerprint = found[-1][0] if found and found[-1] is not None else b""

    def hide(self, data: bytes) -> bytes:
        r"""Return complete events of a stream as they would be had the gateway not asked for usage.

        Examples
        --------
        >>> habits = StreamHabits()
        >>> habits.fingerprint = b',"system_fingerprint":"v1"'
        >>> habits.hide(b'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: {"choices":[],"usage":{"x":1}}\n\n')
        b'data: {"choices":[{"finish_reason":"stop"}],"system_fingerprint":"v1"}\n\n'
        """
        if USAGE_FIELD in data or (_FINISH in data and self.fingerprint):
            return b"".join([self._shown(event) for event in events_of(data)])
        return data

    def _shown(self, event: bytes) -> bytes:
        if USAGE_FIELD in event:
            event = self._without_usage(event)
        if _FINISH in event and self.fingerprint and _FINGERPRINT.search(event) is None:
            last = event.rfind(b"}")
            return event[:last] + self.fingerprint + event[last:]
        return event

    def _without_usage(self, event: bytes) -> bytes:
        """Return an event without its usage; nothing, if it has no more."""
        if self.has_nulls and _NO_USAGE.search(event) is not None:
            return event
        if b'"choices"' not in event or _NO_CHOICES.search(event) is not None:
            if self.fingerprint and (found := _FINGERPRINT.search(event)) is not None:
                self.fingerprint = found[0]
            return b""
        before, _, after = event.partition(USAGE_FIELD)
        try:
            text = after.decode()
            begin = len(text) - len(text.lstrip(" "))
            _, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return event
        after = text[end:].encode()
        if self.has_nulls:
            return before + USAGE_FIELD + b" " * begin + b"null" + after
        if (kept := before.rstrip(b" ")).endswith(b","):
            return kept[:-1] + after
        return before + after.lstrip(b", ")
