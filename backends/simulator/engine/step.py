"""The result of one iteration of an engine, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Emission(NamedTuple):
    """The tokens that one request gets from a step."""

    request_id: int
    tokens: int
    drafted: int
    first: bool
    finished: bool


class Admission(NamedTuple):
    """A request that joined the batch, and the number of its prompt tokens found in the prefix cache."""

    request_id: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration. All of it is known when it begins; its tokens exist when it ends.

    Parameters
    ----------
    duration_s
        Duration in seconds.
    request_ids, tokens, drafted, sent
        For each request that gets tokens: its id, the tokens it gets, the draft tokens verified for it, and its
        output tokens so far, including this step. int64, shape (requests that get tokens,).
    finished
        Whether the request has all its tokens. bool, same shape.
    admitted
        Requests that joined the batch.
    batch_requests, batch_tokens, context_tokens, k
        What determines the duration: requests and tokens scheduled, context tokens that they attend to, and k.
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
        """The emitted tokens, request by request."""
        first = self.sent == self.tokens
        columns = (self.request_ids, self.tokens, self.drafted, first, self.finished)
        return list(map(Emission._make, zip(*(column.tolist() for column in columns), strict=True)))


@dataclass(slots=True)
class Counters:
    """Totals of an engine since it was created.

    Parameters
    ----------
    drafts, draft_tokens, accepted_tokens
        Drafts verified (one per request and step), and the tokens drafted and accepted.
    accepted_at
        Accepted tokens by position in the draft, shape (max(1, k),).
    prefix_queries, prefix_hits
        Prompt tokens looked up and found in the prefix cache.
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
