"""The rest of a stream, from another backend, as events of the stream that has begun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from gateway.dialects.sse import EventStream
from gateway.rescue.passed import PassedStream
from gateway.rescue.request import RescuableRequest
from policies.features.request import Endpoint

DONE: Final = b"data: [DONE]\n\n"
_SPECIAL: Final = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,20}\])")  # the form of the names of special tokens


class InexactSeamError(Exception):
    """The text that the client has is not that of the tokens so far."""


def pending_text(text: str, decoded: str, most_chars: int) -> str | None:
    r"""Return the text of the tokens so far that the client does not have yet; None if tokens have to be dropped.

    An engine withholds what may be the beginning of a stop string, and a character whose bytes are not complete. It
    leaves out special tokens.

    Examples
    --------
    >>> pending_text("one t", "one<|im_end|> two", 8), pending_text("f", "f\ufffd", 0)
    ('wo', None)
    """
    if text.startswith(" ") and not decoded.startswith(" "):
        decoded = " " + decoded  # some tokenizers leave out a space at the beginning of a text
    at, pending, is_certain = 0, "", True
    for piece in _SPECIAL.split(decoded):
        if at < len(text):
            if text.startswith(piece, at):
                at += len(piece)
            elif piece.startswith(text[at:]):
                pending, at = piece[len(text) - at :], len(text)
            elif not _SPECIAL.fullmatch(piece):
                raise InexactSeamError
        elif _SPECIAL.fullmatch(piece):
            is_certain = is_certain and len(piece) > most_chars  # else it may be text that was withheld
        else:
            pending += piece
    if pending.endswith("\ufffd"):
        return None
    if at < len(text) or len(pending) > most_chars or not is_certain:
        raise InexactSeamError
    return pending


def reach(stops: list[str]) -> int:
    """Return how many characters of a stop string can be before those that complete it."""
    return max(map(len, stops), default=1) - 1


class ContinuedStream:
    """Makes the events of another backend those of the stream that has begun."""

    def __init__(self, request: RescuableRequest, passed: PassedStream, pending: str = "") -> None:
        self._request = request
        self._passed = passed  # what the client has; grows with what it gets
        self._tokens_before = len(passed.ids)
        self._events = EventStream(request.endpoint)
        self._reach = reach(request.stops)
        self._shown_before = passed.text[-self._reach :] if self._reach else ""
        self._pending_chars = len(pending)
        self._held = pending
        self._new_chars = 0
        self._is_at_seam = True
        self.is_done = False  # whether the stream is complete
        self.is_stopped = False  # whether it is, at a stop string that its backend does not see
        self.has_error = False  # whether the backend has ended it with an error

    def feed(self, data: bytes) -> bytes:
        """Return the events for the client; stops at the end of the stream, and before an error."""
        out: list[bytes] = []
        for line in self._events.feed(data).split(b"\n"):
            if self.is_done or self.has_error or not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                if self._passed.finish_reason:
                    out.append(DONE)
                    self.is_done = True
                else:
                    self.has_error = True
                continue
            document = _parsed(value)
            if document is None or "error" in document or not isinstance(document.get("choices"), list):
                self.has_error = True
                continue
            out.extend(self._events_for(document))
        return b"".join(out)

    def close(self, finish_reason: str) -> bytes:
        """Return the events that end a stream without a backend."""
        out: list[bytes] = []
        if not self._passed.finish_reason:
            shown, stop = self._shown("", is_last=True)
            out.append(self._chunk(shown, "stop" if stop else finish_reason, stop or None))
        out += self._end()
        return b"".join(out)

    def _events_for(self, document: dict[str, Any]) -> Iterator[bytes]:
        passed = self._passed
        if not document["choices"]:
            if (usage := document.get("usage")) is not None and not passed.has_usage:
                yield self._usage_event(self._tokens_before + int(usage.get("completion_tokens") or 0), document)
            return
        choice = document["choices"][0]
        if not passed.prompt_ids and (ids := document.get("prompt_token_ids") or choice.get("prompt_token_ids")):
            passed.prompt_ids.extend(ids)
        passed.add_ids(choice.get("token_ids") or [])
        text = choice["text"] if "text" in choice else (choice["delta"].get("content") or "")
        reason = choice.get("finish_reason") or ""
        shown, stop = self._shown(text, is_last=bool(reason))
        if stop:
            self.is_stopped = True
            yield self._chunk(shown, "stop", stop)
            yield from self._end()
        elif shown or reason or self._request.with_running_usage:
            yield self._chunk(shown, reason, choice.get("stop_reason"))

    def _shown(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Return the text that can be shown, and the stop string across the seam at which it ends, or nothing."""
        if not self._is_at_seam:
            return text, ""
        self._held += text
        self._new_chars += len(text)
        if self._reach:
            if (found := self._stop_across()) is not None:
                start, stop = found
                end = start + len(stop) if self._request.includes_stop else start
                return self._held[: max(0, end)], stop
            if self._new_chars < self._reach and not is_last:
                return "", ""
        self._is_at_seam = False
        shown, self._held = self._held, ""
        return shown, ""

    def _stop_across(self) -> tuple[int, str] | None:
        """Return where a stop string begins that the backend does not see, relative to the held text, and the string.

        It begins before the seam. It may also end there, if that is the second one: the backend that was between them
        had seen its end, but not its beginning.
        """
        shown = len(self._shown_before)
        joined = self._shown_before + self._held
        best: tuple[int, str] | None = None
        for stop in self._request.stops:
            start = joined.find(stop, max(0, shown - len(stop) + 1))
            is_across = 0 <= start < shown + self._pending_chars
            if is_across and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = start, stop
        return None if best is None else (best[0] - shown, best[1])

    def _chunk(self, text: str, finish_reason: str, stop_reason: object) -> bytes:
        passed = self._passed
        passed.add(text)
        passed.finish_reason = finish_reason
        choice: dict[str, Any] = {"index": 0}
        if self._request.endpoint is Endpoint.CHAT:
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": finish_reason or None}
            if finish_reason:
                choice["stop_reason"] = stop_reason
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": finish_reason or None}
            choice |= {"stop_reason": stop_reason, "prompt_token_ids": None}
        choice["token_ids"] = None
        document = {**passed.head, "choices": [choice]}
        if self._request.with_running_usage:
            document["usage"] = self._usage(len(passed.ids))
        return b"data: %b\n\n" % orjson.dumps(document)

    def _end(self) -> Iterator[bytes]:
        self.is_done = True
        if self._request.with_usage and not self._passed.has_usage:
            yield self._usage_event(len(self._passed.ids), {})
        yield DONE

    def _usage_event(self, completion_tokens: int, source: dict[str, Any]) -> bytes:
        """Return the event with the usage of the whole answer.

        The backend's `metrics` (times, acceptance) are left out: they are those of the rest alone.
        """
        self._passed.has_usage = True
        document = {**self._passed.head, "choices": [], "usage": self._usage(completion_tokens)}
        if "system_fingerprint" in source:
            document["system_fingerprint"] = source["system_fingerprint"]
        return b"data: %b\n\n" % orjson.dumps(document)

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self._passed.prompt_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }


def _parsed(value: bytes) -> dict[str, Any] | None:
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None
