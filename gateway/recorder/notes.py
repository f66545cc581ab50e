"""Notes on a request in flight: what its record needs and cannot be determined after it has ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from backends.backend import Backend, EngineLoad
from gateway.dialects.transcript import Transcript, read_document
from gateway.relay.observers import EndedExchange, Observer
from policies.policy import Decision


class RequestNotes(Observer):
    """The notes on one request.

    Examples
    --------
    >>> notes = RequestNotes(print, keeps_answer=True, max_bytes=8)
    >>> notes.on_chunk(b"data: 1", 10.0)
    >>> notes.answer, notes.chunks
    ([b'data: 1'], array('d', [10.0]))
    >>> notes.on_chunk(b"data: 2", 11.0)
    >>> notes.answer is None
    True
    """

    def __init__(
        self,
        record: Callable[[RequestNotes, EndedExchange], None],
        body: bytes = b"",
        *,
        keeps_answer: bool,
        max_bytes: int = 0,
    ) -> None:
        self._record = record  # called with the notes and the exchange when that has ended
        self._max_bytes = self._remaining_bytes = max_bytes
        self.body = body  # body of the request, if the record needs more of it than the features; else empty
        # The bytes of a stream; None if answers are not kept, or this one was too long.
        self.answer: list[bytes] | None = [] if keeps_answer else None
        self.transcript: Transcript | None = None  # the text of an answer in one piece
        # candidates, in_flight, loads: the candidates of its last decision, and their requests in flight and loads at
        # that time.
        self.candidates: Sequence[Backend] = ()
        self.in_flight: list[int] = []
        self.loads: list[EngineLoad] = []
        self.chunks: array[float] = array("d")  # arrival of each chunk of the stream, by `time.perf_counter`
        self._document: object = None

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Store the candidates of a decision and their loads."""
        self.candidates = candidates
        self.in_flight = [backend.in_flight for backend in candidates]
        self.loads = [backend.load for backend in candidates]

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Append a part of a stream, if answers are kept."""
        self.chunks.append(now_s)
        if self._has_room(data) and self.answer is not None:
            self.answer.append(data)

    def on_answer(self, body: bytes, document: object) -> None:
        """Keep an answer in one piece, if answers are kept."""
        if self._has_room(body):
            self._document = document

    def on_end(self, ended: EndedExchange) -> None:
        """Record the request."""
        document, self._document = self._document, None
        if isinstance(document, dict):
            self.transcript = read_document(ended.routed.features.endpoint, document)
        self._record(self, ended)

    def _has_room(self, data: bytes) -> bool:
        if self.answer is None:
            return False
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            self.answer = None
        return self._remaining_bytes >= 0

    def held_bytes(self, ended: EndedExchange) -> int:
        """Return an estimate of the memory of the texts."""
        held = len(self.body)
        if (prompt := ended.routed.prompt) is not None:
            held += _size_bytes(prompt.pieces, prompt.ids)
        if (transcript := self.transcript) is not None:
            held += _size_bytes(transcript.pieces, transcript.token_ids)
        elif self.answer is not None:
            held += self._max_bytes - self._remaining_bytes
        return held


def _size_bytes(texts: list[str], ids: list[int]) -> int:
    size = _ID_BYTES * len(ids)
    for text in texts:
        size += len(text) if text.isascii() else _CHARACTER_BYTES * len(text)
    return size


_ID_BYTES = 40
_CHARACTER_BYTES = 4  # at most
