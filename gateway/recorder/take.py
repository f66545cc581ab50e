"""What is noted of a request while it runs: everything that cannot be found out when it has ended."""

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


# Made for each request, as what `policies.decision` has.
@dataclass(slots=True, init=False)
class RequestNotes:
    """The notes on one request.

    Attributes
    ----------
    candidates, in_flight, loads
        Those of its last decision, and the requests in flight and the load that each had then.
    chunks
        When each chunk of the stream came, on the clock of `time.perf_counter`.
    answer
        The bytes of a stream; None if answers are not kept, or this one was longer than it may be.
    transcript
        The text of an answer in one piece.
    most_bytes, room
        Bytes that the answer may have, and may still have.
    keep_prompt_bytes
        The prompt of a body that is no longer is to be kept.
    """

    answer: list[bytes] | None
    transcript: Transcript | None
    most_bytes: int
    room: int
    keep_prompt_bytes: int
    candidates: Sequence[Backend]
    in_flight: list[int]
    loads: list[EngineLoad]
    chunks: array[float]

    def __init__(self, answer: list[bytes] | None, most_bytes: int, keep_prompt_bytes: int = 0) -> None:
        self.answer = answer
        self.transcript = None
        self.most_bytes = self.room = most_bytes
        self.keep_prompt_bytes = keep_prompt_bytes
        self.candidates = ()
        self.in_flight = []
        self.loads = []
        self.chunks = array("d")

    def choose(self, candidates: Sequence[Backend]) -> None:
        """Note the candidates of a decision, before the request is sent."""
        self.candidates = candidates
        self.in_flight = [one.in_flight for one in candidates]
        self.loads = [one.load for one in candidates]

    def keep(self, data: bytes) -> None:
        """Keep a part of a stream; where answers are not kept, nothing."""
        if self.answer is None:
            return
        self.room -= len(data)
        if self.room < 0:
            self.answer = None
        else:
            self.answer.append(data)

    def read(self, endpoint: Endpoint, document: object, size_bytes: int) -> None:
        """Keep the text of an answer in one piece, which was parsed; where answers are not kept, nothing."""
        if self.answer is None:
            return
        self.room -= size_bytes
        if self.room >= 0 and isinstance(document, dict):
            self.transcript = read_document(endpoint, document)


@dataclass(slots=True, init=False)
class FinishedRequest:
    """A request that has ended, as it waits in the queue.

    Parameters
    ----------
    key
        Name of the client's key.
    body
        Of the request, where more is to be read from it than its features; else empty.
    decision, backend
        None if no backend was up.
    retried_from
        The backend that failed it first; empty if none did.
    word
        What became of it, one of `gateway.telemetry.metrics.OUTCOMES`.
    outcome
        None if it was not answered.
    arrived_s, ended_s
        On the clock of `time.perf_counter`.
    """

    take: RequestNotes
    request_id: bytes
    key: str
    routed: RoutedRequest
    body: bytes
    decision: Decision | None
    backend: Backend | None
    retried_from: str
    status: int
    word: str
    outcome: Outcome | None
    usage: Usage | None
    arrived_s: float
    ended_s: float

    def __init__(  # noqa: PLR0917 -- a record
        self,
        take: RequestNotes,
        request_id: bytes,
        key: str,
        routed: RoutedRequest,
        body: bytes,
        decision: Decision | None,
        backend: Backend | None,
        retried_from: str,
        status: int,
        word: str,
        outcome: Outcome | None,
        usage: Usage | None,
        arrived_s: float,
        ended_s: float,
    ) -> None:
        self.take = take
        self.request_id = request_id
        self.key = key
        self.routed = routed
        self.body = body
        self.decision = decision
        self.backend = backend
        self.retried_from = retried_from
        self.status = status
        self.word = word
        self.outcome = outcome
        self.usage = usage
        self.arrived_s = arrived_s
        self.ended_s = ended_s

    def held_bytes(self) -> int:
        """Return about how much memory its texts take."""
        held = len(self.body)
        if (prompt := self.routed.prompt) is not None:
            held += _size_bytes(prompt.pieces, prompt.ids)
        take = self.take
        if (transcript := take.transcript) is not None:
            held += _size_bytes(transcript.pieces, transcript.token_ids)
        elif take.answer is not None:
            held += take.most_bytes - take.room
        return held


def _size_bytes(texts: list[str], ids: list[int]) -> int:
    size = _ID_BYTES * len(ids)
    for text in texts:
        size += len(text) if text.isascii() else _CHARACTER_BYTES * len(text)
    return size


_ID_BYTES = 40
_CHARACTER_BYTES = 4  # at most
