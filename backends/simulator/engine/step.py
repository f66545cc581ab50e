"""The result of one iteration of an engine, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Emission(NamedTuple):
    """The tokens that one request gets from a step.

    Parameters
    ----------
    tokens, drafted
        Tokens that it gets, and draft tokens scheduled for it; under adaptive verification fewer are verified.
    sent, left
        Its output tokens so far, including this step, and those still to come.
    """

    request_id: int
    tokens: int
    drafted: int
    sent: int
    left: int


class Admission(NamedTuple):
    """A request that joined the batch, and the number of its prompt tokens found in the prefix cache."""

    request_id: int
    cached_tokens: int


class Step(NamedTuple):
    """One iteration. All of it is known when it begins; its tokens exist when it ends.

    Parameters
    ----------
    duration_s
        Duration in seconds.
    emissions
        The requests that get tokens, in order of admission.
    admitted
        Requests that joined the batch.
    k, batch_tokens, context_tokens
        What determines the duration, with the number of emissions: the tokens drafted for each request, to be verified
        in the next step, the tokens computed, and the context tokens that they attend to.
    """

    duration_s: float
    emissions: list[Emission]
    admitted: list[Admission]
    k: int
    batch_tokens: int
    context_tokens: int


@dataclass(slots=True)
class Counters:
    """Totals of an engine since it was created. A step is counted when it begins.

    Parameters
    ----------
    drafts, draft_tokens, accepted_tokens
        Drafts scheduled (one per request and step), and the tokens drafted and accepted. As in vLLM, tokens that
        adaptive verification leaves out count as drafted.
    accepted_at
        Accepted tokens by position in the draft, shape (max(1, k),).
    prefix_queries, prefix_hits
        Prompt tokens looked up and found in the prefix cache.
    """

    accepted_at: npt.NDArray[np.int64]
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
