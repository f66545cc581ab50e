"""Requests whose text is to be replayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.policy import Outcome


@dataclass(slots=True)
class AnswerBuffer:
    """Collects the bytes of an answer in flight, up to a limit.

    Attributes
    ----------
    room
        Bytes left; negative if the answer exceeded the limit and was discarded.

    Examples
    --------
    >>> buffer = AnswerBuffer(room=4)
    >>> buffer.append(b"abc")
    >>> buffer.append(b"de")
    >>> buffer.parts, buffer.room
    ([], -1)
    """

    room: int
    parts: list[bytes] = field(default_factory=list)

    def append(self, data: bytes) -> None:
        """Add a part of the answer."""
        self.room -= len(data)
        if self.room < 0:
            self.parts.clear()
        else:
            self.parts.append(data)


@dataclass(frozen=True, slots=True)
class FinishedText:
    """A finished request that waits to be replayed.

    Parameters
    ----------
    outcome
        Outcome of the request.
    body
        Body of the request.
    answer
        Parts of the response body.
    streamed
        Whether the response is a stream of events.
    size_bytes
        Size of body and answer.
    """

    outcome: Outcome
    body: bytes
    answer: list[bytes]
    streamed: bool
    size_bytes: int
