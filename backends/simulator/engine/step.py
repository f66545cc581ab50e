"""The result of one iteration of an engine, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Emission(NamedTuple):
    """The tokens that one request gets from a step."""

    request_id: int
    # tokens, drafted: tokens it gets, and draft tokens scheduled for it, of which adaptive verification verifies fewer.
    tokens: int
    drafted: int
    # sent, left: its output tokens so far, including this step, and those still to come.
    sent: int
    left: int


class Admission(NamedTuple):
    """A request that joined the batch, and how many of its prompt tokens were in the prefix cache."""

    request_id: int
    cached_tokens: int


class EngineStep(NamedTuple):
    """One iteration. Its results are known when it begins; its tokens exist when it ends."""

    duration_s: float  # duration in seconds
    emissions: list[Emission]  # the requests that get tokens, in order of admission
    admitted: list[Admission]  # requests that joined the batch
    # k, batch_tokens, context_tokens: with the number of emissions, these determine the duration: tokens drafted per
    # request, to be verified in the next step; tokens computed; context tokens that they attend to.
    k: int
    batch_tokens: int
    context_tokens: int


@dataclass(slots=True)
class Counters:
    """An engine's totals since its creation. A step counts when it begins."""

    accepted_at: npt.NDArray[np.int64]  # accepted tokens by position in the draft, shape (max(1, k),)
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    # prefix_queries, prefix_hits: prompt tokens looked up and found in the prefix cache.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # drafts, draft_tokens, accepted_tokens: drafts scheduled (one per request and step), and tokens drafted and
    # accepted. As in vLLM, tokens that adaptive verification skips count as drafted.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
