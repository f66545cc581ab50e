"""The text of a request and its answer, to be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from gateway.relay.observers import EndedExchange, Observer
from policies.policy import Outcome


class AnswerText(Observer):
    """Collects the bytes of an answer, up to a limit.

    Examples
    --------
    >>> text = AnswerText(print, b"{}", room=4)
    >>> text.on_chunk(b"abc", 1.0)
    >>> text.parts, text.size_bytes
    ([b'abc'], 5)
    >>> text.on_chunk(b"de", 2.0)
    >>> text.parts
    []
    """

    needs_answer: ClassVar[bool] = False
    outcome: Outcome  # outcome of the request; not set before its end

    def __init__(self, add: Callable[[AnswerText], None], body: bytes, room: int) -> None:
        self._add = add  # called with this, complete, if the request succeeds
        self._room = room  # largest answer in bytes
        self.body = body
        self.size_bytes = len(body)
        self.parts: list[bytes] = []  # parts of the answer; empty if it was too long
        self.streamed = False  # whether the answer is a stream of events

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Add a part of a stream."""
        self.streamed = True
        self.on_answer(data, None)

    def on_answer(self, body: bytes, document: object) -> None:
        """Add a part of the answer."""
        self._room -= len(body)
        self.size_bytes += len(body)
        if self._room < 0:
            self.parts.clear()
        else:
            self.parts.append(body)

    def on_end(self, ended: EndedExchange) -> None:
        """Pass on the text of a request that succeeded."""
        outcome = ended.outcome
        if outcome is not None and self.parts and ended.label == "ok" and ended.status == 200:
            self.outcome = outcome
            self._add(self)
