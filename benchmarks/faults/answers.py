"""Whether an answer is the whole answer to its request, word by word."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from benchmarks.faults.asking import Work

_SHOWN = 160


class Answer(ABC):
    """An answer as its client has received it so far."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._data = bytearray()
        self.status = 0

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._data += data

    def verdict(self) -> tuple[str, str]:
        """Return the outcome of an answer whose HTTP message has ended, and what was wrong with it."""
        if self.status != 200:
            return f"status {self.status}", self._data[:_SHOWN].decode("utf-8", "replace")
        return self._judge()

    def verdict_if_cut(self) -> str:
        """Return the outcome of an answer whose connection has broken off."""
        if self.status == 200 and self._judge()[0] in ("answered", "error event"):
            return self._judge()[0]  # all that matters has come before the cut
        return "cut"

    @abstractmethod
    def _judge(self) -> tuple[str, str]:
        """Return the outcome by the body of an answer of 200."""

    def _compared(self, text: str) -> tuple[str, str]:
        expected = self._work.text()
        if text == expected:
            return "answered", ""
        if expected.startswith(text):
            return "incomplete", f"{text.count(' ')} of {self._work.tokens} words"
        return "wrong", f"got {text[:_SHOWN]!r} for {self._work.request_id}"


class DocumentAnswer(Answer):
    """An answer in one piece."""

    def _judge(self) -> tuple[str, str]:
        try:
            choice = json.loads(self._data)["choices"][0]
            text = choice["message"]["content"] if self._work.is_chat else choice["text"]
        except (ValueError, LookupError, TypeError):
            return "wrong", f"not a completion: {bytes(self._data[:_SHOWN])!r}"
        return self._compared(text)


class StreamedAnswer(Answer):
    """A stream of events."""

    def _judge(self) -> tuple[str, str]:
        text, has_finished, is_done = "", False, False
        for line in bytes(self._data).split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                is_done = True
                continue
            try:
                document: dict[str, Any] = json.loads(value)
            except ValueError:
                return "wrong", f"not an event: {line[:_SHOWN]!r}"
            if "error" in document:
                return "error event", str(document["error"])[:_SHOWN]
            for choice in document.get("choices", []):
                text += (choice.get("delta", {}).get("content") if self._work.is_chat else choice.get("text")) or ""
                has_finished = has_finished or choice.get("finish_reason") is not None
        what, detail = self._compared(text)
        if what == "answered" and not (has_finished and is_done):
            return "incomplete", "every word, but no finish_reason" if is_done else "every word, but no end"
        return what, detail
