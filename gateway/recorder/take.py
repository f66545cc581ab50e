"""What is noted of a request while it runs: everything that cannot be found out when it has ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from backends.backend import Backend, EngineLoad
from gateway.routing import Routed
from gateway.usage import Usage
from policies.policy import Decision, Outcome


# Made for each request, as what `policies.decision` has.
@dataclass(slots=True, init=False)
class Take:
    """The notes on one request.

    Attributes
    ----------
    candidates, in_flight, loads
        Those of its last decision, and the requests in flight and the load that each had then.
    chunks
        When each chunk of the stream came, on the clock of `time.perf_counter`.
    answer
        The bytes of the answer; None if they are not kept, or were more than may be.
    room
        Bytes that the answer may still have.
    """

    answer: list[bytes] | None
    room: int
    candidates: Sequence[Backend]
    in_flight: list[int]
    loads: list[EngineLoad]
    chunks: array[float]

    def __init__(self, answer: list[bytes] | None, room: int) -> None:
        self.answer = answer
        self.room = room
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
        """Keep a part of the answer, or all of it; where answers are not kept, nothing."""
        if self.answer is None:
            return
        self.room -= len(data)
        if self.room < 0:
            self.answer = None
        else:
            self.answer.append(data)


@dataclass(slots=True, init=False)
class Taken:
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
        What became of it, one of `gateway.metrics.OUTCOMES`.
    outcome
        None if it was not answered.
    arrived_s, ended_s
        On the clock of `time.perf_counter`.
    size_bytes
        Of the texts that it holds; the recorder's.
    """

    take: Take
    request_id: bytes
    key: str
    routed: Routed
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
    size_bytes: int

    def __init__(  # noqa: PLR0917 -- a record
        self,
        take: Take,
        request_id: bytes,
        key: str,
        routed: Routed,
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
        size_bytes: int = 0,
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
        self.size_bytes = size_bytes
