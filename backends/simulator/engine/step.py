"""What comes of one iteration of an engine, and of all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Emission(NamedTuple):
    """What one request gets from a step."""

    request_id: int
    tokens: int
    drafted: int
    first: bool
    finished: bool


class Admission(NamedTuple):
    """A request that joined the batch, and how many of its prompt tokens were in the prefix cache."""

    request_id: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration: everything about it is known when it begins; its tokens exist when it ends.

    Parameters
    ----------
    duration_s
        Seconds it takes.
    request_ids, tokens, drafted, sent
        int64, shape (requests that get tokens,): who gets how many, how many drafts were verified for them, and
        how many output tokens each has had with this step.
    finished
        bool, same shape.
    admitted
        Requests that joined the batch.
    batch_requests, batch_tokens, context_tokens, k
        What the duration follows from: requests and tokens scheduled, tokens of context they read, and k.
    """

    duration_s: float
    request_ids: Ints
    tokens: Ints
    drafted: Ints
    sent: Ints
    finished: npt.NDArray[np.bool_]
    admitted: tuple[Admission, ...]
    batch_requests: int
    batch_tokens: int
    context_tokens: int
    k: int

    @property
    def emissions(self) -> list[Emission]:
        """The same request by request."""
        first = self.sent == self.tokens
        columns = (self.request_ids, self.tokens, self.drafted, first, self.finished)
        return list(map(Emission._make, zip(*(column.tolist() for column in columns), strict=True)))


@dataclass(slots=True)
class Counters:
    """What an engine has done since it began.

    Parameters
    ----------
    drafts, draft_tokens, accepted_tokens
        Steps of a request that verified drafts, the tokens drafted, and those accepted.
    accepted_at
        Accepted tokens by position in the draft, shape (k,).
    prefix_queries, prefix_hits
        Prompt tokens looked up in the prefix cache, and found.
    """

    accepted_at: Ints
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
