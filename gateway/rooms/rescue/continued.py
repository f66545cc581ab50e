"""Rewrites the rest of a stream, from another backend, as events of the stream that has begun."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from gateway.dialects.sse import EventStream
from gateway.rooms.rescue.passed import OUTPUT, PassedStream
from gateway.rooms.rescue.request import RescuableRequest
from policies.features.request import Endpoint

DONE: Final = b"data: [DONE]\n\n"
_NOTHING: Final[Mapping[str, object]] = {}
_SPECIAL: Final = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,20}\])")  # what special tokens look like


class InexactSeamError(Exception):
    """Raised if the client's text is not that of the tokens so far."""


def ends_within_character(text: str, decoded: str) -> bool:
    r"""Return whether the decoded tokens end in part of a character, which the client does not have.

    Otherwise they must equal the client's text; raise `InexactSeamError` if not. An engine withholds such a part, and
    leaves out special tokens.

    Examples
    --------
    >>> ends_within_character("one", "one<|im_end|>"), ends_within_character("f", "f\ufffd")
    (False, True)
    """
    if text.startswith(" ") and not decoded.startswith(" "):
        decoded = " " + decoded  # some tokenizers leave out a space at the beginning of a text
    at, more = 0, ""
    for piece in _SPECIAL.split(decoded):
        rest = text[at:]
        if rest.startswith(piece):
            at += len(piece)
        elif piece.startswith(rest) and not (_SPECIAL.fullmatch(piece) and not rest):
            at, more = len(text), more + piece[len(rest) :]
        elif not _SPECIAL.fullmatch(piece):
            raise InexactSeamError
    if more.endswith("\ufffd"):
        return True
    if at < len(text) or more:
        raise InexactSeamError
    return False


class ContinuedStream:
    """Rewrites the events of another backend as those of the stream that has begun."""

    def __init__(self, request: RescuableRequest, passed: PassedStream) -> None:
        self._request = request
        self._passed = passed  # what the client has, updated here
        self._tokens_before = len(passed.ids)
        self._events = EventStream(request.endpoint)
        self.is_done = False  # whether the stream is complete
        self.has_error = False  # whether the backend ended it with an error

    def feed(self, data: bytes) -> bytes:
        """Return the events for the client; stop at the end of the stream, or where its engine gives it up."""
        out: list[bytes] = []
        for line in self._events.feed(data).split(b"\n"):
            if self.is_done or self.has_error or not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                out.append(DONE)
                self.is_done = True
                continue
            try:
                out.extend(self._events_for(orjson.loads(value)))
            except (AttributeError, LookupError, OverflowError, TypeError, ValueError):  # an error, or invalid
                self.has_error = True
        self.has_error = self.has_error or self._events.withheld != b""
        return b"".join(out)

    def close(self, finish_reason: str) -> bytes:
        """Return the events that end a stream without a backend."""
        out = b"" if self._passed.finish_reason else self._chunk("", finish_reason, None)
        if self._request.with_usage and not self._passed.has_usage:
            out += self._usage_event(len(self._passed.ids), {})
        return out + DONE

    def _events_for(self, document: dict[str, Any]) -> Iterator[bytes]:
        passed, choices = self._passed, document["choices"]
        if choices == []:
            if (usage := document.get("usage")) is not None and not passed.has_usage:
                yield self._usage_event(self._tokens_before + int(usage.get("completion_tokens") or 0), document)
            return
        choice = choices[0]
        if not passed.prompt_ids and (ids := document.get("prompt_token_ids") or choice.get("prompt_token_ids")):
            passed.prompt_ids.extend(ids)
        passed.ids.extend(choice.get("token_ids") or [])
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        # Only if the request itself was resent, since the client had no text: such as reasoning.
        others = {name: value for name, value in delta.items() if value and name not in OUTPUT}
        passed.is_text = passed.is_text and not others
        reason = choice.get("finish_reason") or ""
        if text or others or reason:
            yield self._chunk(text, reason, choice.get("stop_reason"), others)

    def _chunk(
        self, text: str, finish_reason: str, stop_reason: object, others: Mapping[str, object] = _NOTHING
    ) -> bytes:
        passed = self._passed
        passed.add(text)
        passed.finish_reason = finish_reason
        choice: dict[str, Any] = {"index": 0}
        if self._request.endpoint is Endpoint.CHAT:
            choice |= {"delta": {"content": text, **others}, "logprobs": None, "finish_reason": finish_reason or None}
            if finish_reason:
                choice["stop_reason"] = stop_reason
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": finish_reason or None}
            choice |= {"stop_reason": stop_reason, "prompt_token_ids": None}
        choice["token_ids"] = None
        document = {**passed.head, "choices": [choice]}
        return b"data: %b\n\n" % orjson.dumps(document)

    def _usage_event(self, completion_tokens: int, source: dict[str, Any]) -> bytes:
        """Return the event with the usage of the whole answer.

        The backend's `metrics` (times, acceptance) are left out: they cover only the rest.
        """
        self._passed.has_usage = True
        prompt_tokens = len(self._passed.prompt_ids)
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        document = {**self._passed.head, "choices": [], "usage": usage}
        if "system_fingerprint" in source:
            document["system_fingerprint"] = source["system_fingerprint"]
        return b"data: %b\n\n" % orjson.dumps(document)
