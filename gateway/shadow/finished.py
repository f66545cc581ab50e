"""What is kept of a request whose text is to be replayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.policy import Outcome


@dataclass(slots=True)
class Kept:
    """The bytes of an answer under way.

    Attributes
    ----------
    room
        Bytes that it may still have; negative once it was too long, and nothing is kept of it.
    """

    room: int
    parts: list[bytes] = field(default_factory=list)

    def keep(self, data: bytes) -> None:
        """Keep a part, or all of it."""
        self.room -= len(data)
        if self.room < 0:
            self.parts.clear()
        else:
            self.parts.append(data)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended, as it waits to be replayed.

    Parameters
    ----------
    body
        Of the request.
    streamed
        Whether the answer is the events of a stream, not one document.
    """

    outcome: Outcome
    body: bytes
    answer: list[bytes]
    streamed: bool
    size_bytes: int
