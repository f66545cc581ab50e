"""Notes on a request in flight: what its record needs and cannot be determined after it has ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from backends.backend import Backend, EngineLoad
from gateway.http.transcript import Transcript, read_document
from gateway.http.usage import Usage
from gateway.routing.router import RoutedRequest
from policies.features.request import Endpoint
from policies.policy import Decision, Outcome


# Hand-written `__init__`, as in `policies.decision`: one is created per request.
@dataclass(slots=True, init=False)
class RequestNotes:
    """The notes on one request.

    Parameters
    ----------
    answer
        An empty list, or None if answers are not kept.
    max_bytes
        Size of the largest answer that is kept.
    keep_prompt_bytes
        Size of the largest body whose prompt is kept.

    Attributes
    ----------
    candidates, in_flight, loads
        The candidates of its last decision, and their requests in flight and loads at that time.
    chunks
        Arrival of each chunk of the stream, by `time.perf_counter`.
    answer
        The bytes of a stream; None if answers are not kept, or this one was too long.
    transcript
        The text of an answer in one piece.
    remaining_bytes
        What `max_bytes` leaves for the rest of the answer; negative if it was too long.

    Examples
    --------
    >>> notes = RequestNotes([], max_bytes=8)
    >>> notes.keep(b"data: 1")
    >>> notes.answer, notes.remaining_bytes
    ([b'data: 1'], 1)
    >>> notes.keep(b"data: 2")
    >>> notes.answer is None
    True
    """

    answer: list[bytes] | None
    transcript: Transcript | None
    max_bytes: int
    remaining_bytes: int
    keep_prompt_bytes: int
    candidates: Sequence[Backend]
    in_flight: list[int]
    loads: list[EngineLoad]
    chunks: array[float]

    def __init__(self, answer: list[bytes] | None, max_bytes: int, keep_prompt_bytes: int = 0) -> None:
        self.answer = answer
        self.transcript = None
        self.max_bytes = self.remaining_bytes = max_bytes
        self.keep_prompt_bytes = keep_prompt_bytes
        self.candidates = ()
        self.in_flight = []
        self.loads = []
        self.chunks = array("d")

    def note_candidates(self, candidates: Sequence[Backend]) -> None:
        """Store the candidates of a decision and their loads, before the request is sent."""
        self.candidates = candidates
        self.in_flight = [backend.in_flight for backend in candidates]
        self.loads = [backend.load for backend in candidates]

    def keep(self, data: bytes) -> None:
        """Append a part of a stream, if answers are kept."""
        if self.answer is None:
            return
        self.remaining_bytes -= len(data)
        if self.remaining_bytes < 0:
            self.answer = None
        else:
            self.answer.append(data)

    def keep_document(self, endpoint: Endpoint, document: object, size_bytes: int) -> None:
        """Store the text of a parsed answer in one piece, if answers are kept."""
        if self.answer is None:
            return
        self.remaining_bytes -= size_bytes
        if self.remaining_bytes >= 0 and isinstance(document, dict):
            self.transcript = read_document(endpoint, document)


@dataclass(slots=True, init=False)
class FinishedRequest:
    """A request that has ended, to be recorded.

    Parameters
    ----------
    key
        Name of the client's key.
    body
        Body of the request, if the record needs more of it than the features; else empty.
    decision, backend
        None if no backend was up.
    retried_from
        Name of the backend that failed first; empty without a retry.
    outcome_label
        One of `gateway.telemetry.metrics.OUTCOMES`.
    outcome
        None if the request was not answered.
    arrived_s, ended_s
        Arrival and end, by `time.perf_counter`.
    """

    notes: RequestNotes
    request_id: bytes
    key: str
    routed: RoutedRequest
    body: bytes
    decision: Decision | None
    backend: Backend | None
    retried_from: str
    status: int
    outcome_label: str
    outcome: Outcome | None
    usage: Usage | None
    arrived_s: float
    ended_s: float

    def __init__(  # noqa: PLR0917 -- a record
        self,
        notes: RequestNotes,
        request_id: bytes,
        key: str,
        routed: RoutedRequest,
        body: bytes,
        decision: Decision | None,
        backend: Backend | None,
        retried_from: str,
        status: int,
        outcome_label: str,
        outcome: Outcome | None,
        usage: Usage | None,
        arrived_s: float,
        ended_s: float,
    ) -> None:
        self.notes = notes
        self.request_id = request_id
        self.key = key
        self.routed = routed
        self.body = body
        self.decision = decision
        self.backend = backend
        self.retried_from = retried_from
        self.status = status
        self.outcome_label = outcome_label
        self.outcome = outcome
        self.usage = usage
        self.arrived_s = arrived_s
        self.ended_s = ended_s

    def held_bytes(self) -> int:
        """Return an estimate of the memory of its texts."""
        held = len(self.body)
        if (prompt := self.routed.prompt) is not None:
            held += _size_bytes(prompt.pieces, prompt.ids)
        notes = self.notes
        if (transcript := notes.transcript) is not None:
            held += _size_bytes(transcript.pieces, transcript.token_ids)
        elif notes.answer is not None:
            held += notes.max_bytes - notes.remaining_bytes
        return held


def _size_bytes(texts: list[str], ids: list[int]) -> int:
    size = _ID_BYTES * len(ids)
    for text in texts:
        size += len(text) if text.isascii() else _CHARACTER_BYTES * len(text)
    return size


_ID_BYTES = 40
_CHARACTER_BYTES = 4  # at most
