"""What a stream has passed on: its text, the ids of its tokens, and the fields common to all events."""

from __future__ import annotations

import re
from array import array
from typing import Any, Final

import orjson

MAX_CHARS: Final = 1 << 20
"""Length of the longest text that is kept; a longer stream is not rescued."""

_UNREAD_BYTES: Final = 1 << 16  # events stay unparsed up to this size, so that most streams are never parsed
_MOST_UNREAD_BYTES: Final = 1 << 22  # a stream faster than its parsing, which no engine sends, is not rescued
_IDS: Final = re.compile(rb'(token_ids":\s*)\[[\d,\s]*\]')
_NO_IDS: Final = b'token_ids":null'
_HAS_IDS: Final = b'token_ids":'
_LIST: Final = b'token_ids":['
_HAS_PROMPT_IDS: Final = b'prompt_token_ids":'
_PROMPT_IDS: Final = re.compile(rb'prompt_token_ids":\s*\[')
OUTPUT: Final = frozenset({"role", "content"})
"""Fields of a delta that are text; others are reasoning, refusals, calls."""


class PassedStream:
    r"""The part of a stream that the client has.

    Examples
    --------
    >>> passed = PassedStream()
    >>> passed.take(b'data: {"id":"x","choices":[{"index":0,"text":"a","token_ids":[7]}]}\n\n')
    b'data: {"id":"x","choices":[{"index":0,"text":"a","token_ids":null}]}\n\n'
    >>> passed.read()
    >>> passed.text, list(passed.ids), passed.head
    ('a', [7], {'id': 'x'})
    """

    def __init__(self) -> None:
        # The fields common to all events: `id`, `object`, `created` and `model`.
        self.head: dict[str, Any] = {}
        # prompt_ids, ids: ids of the prompt's tokens, and of those generated; complete once `is_exact` was called.
        self.prompt_ids = array("I")
        self.ids = array("I")
        self.finish_reason = ""  # empty before the stream has one
        self.has_usage = False  # whether the usage has been passed on
        self.is_text = True  # whether other backends have added only text
        self._is_whole = True
        self.prompt = b""  # the ids of the prompt, unparsed: there may be 100,000; empty if the engine sends none
        self._unread = bytearray()
        self._texts: list[str] = []
        self._chars = 0

    # For each read of the stream

    def take(self, data: bytes) -> bytes:
        """Keep complete events, and return them for the client, without ids."""
        has_prompt = not self.prompt and data.find(_HAS_PROMPT_IDS) >= 0
        if has_prompt and (found := _PROMPT_IDS.search(data)) is not None:
            begin, end = found.end() - 1, data.find(b"]", found.end()) + 1
            self.prompt, data = data[begin:end], data[:begin] + b"null" + data[end:]
        if self._is_whole:
            self._unread += data
            if len(self._unread) > _UNREAD_BYTES:  # one piece per read, to let others run
                self._read_piece()
                if len(self._unread) > _MOST_UNREAD_BYTES:
                    self._give_up()
        at = data.find(_LIST)
        end = data.find(b"]", at) + 1
        if at >= 0 and data.find(_HAS_IDS, end) < 0:  # one list, as in most reads
            return data[:at] + _NO_IDS + data[end:]
        # `sub` alone is slow if it finds nothing, since it parses its template first.
        if data.find(_HAS_IDS) < 0 or _IDS.search(data) is None:
            return data
        return _IDS.sub(rb"\1null", data)

    # When the stream has failed

    @property
    def text(self) -> str:
        """The text that the client has."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def is_exact(self) -> bool:
        """Whether the stream had only text, whose tokens are known, within the limit."""
        self.read()
        try:
            if self.prompt and not self.prompt_ids:
                self.prompt_ids = array("I", orjson.loads(self.prompt))
        except (orjson.JSONDecodeError, TypeError, OverflowError):
            self._give_up()
        return self._is_whole and self.is_text and bool(self.head) and (bool(self.prompt_ids) or not self.ids)

    def read(self) -> None:
        """Parse the events kept so far."""
        while self._unread:
            self._read_piece()

    def _read_piece(self) -> None:
        end = self._unread.rfind(b"\n", 0, _UNREAD_BYTES) + 1 or len(self._unread)
        unread = bytes(self._unread[:end])
        del self._unread[:end]
        lines = [line[5:] for line in unread.split(b"\n") if line.startswith(b"data:") and b"[DONE]" not in line[:13]]
        try:
            for document in orjson.loads(b"[%b]" % b",".join(lines)):  # one call is a third faster
                if self._is_whole:
                    self._read(document)
        except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError, ValueError, OverflowError):
            self._give_up()
        if self._chars > MAX_CHARS:
            self._give_up()

    def add(self, text: str) -> None:
        """Add text from another backend; raise `TypeError` if it is not text."""
        if not isinstance(text, str):
            raise TypeError("expected a text")
        self._texts.append(text)
        self._chars += len(text)

    def drop_ids(self, count: int) -> None:
        """Drop the last tokens, whose text the client does not have."""
        del self.ids[len(self.ids) - count :]

    def _give_up(self) -> None:
        self._is_whole = False
        self._unread.clear()
        self._texts.clear()
        self.ids = array("I")

    def _read(self, document: dict[str, Any]) -> None:
        if not self.head:
            self.head = {name: document[name] for name in ("id", "object", "created", "model") if name in document}
        choices = document["choices"]
        if not choices:
            self.has_usage = self.has_usage or document.get("usage") is not None
            return
        (choice,) = choices
        delta = choice.get("delta")
        if delta is None:
            text = choice["text"]
        else:
            text = delta.get("content") or ""
            if any(value and name not in OUTPUT for name, value in delta.items()):
                self._give_up()
                return
        ids = choice.get("token_ids")
        if ids:
            self.ids.extend(ids)
        elif text:
            self._give_up()  # the engine does not report them
            return
        self.add(text)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
