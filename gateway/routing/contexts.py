"""Replicas of one model whose engines take contexts of unlike length, as a drafter with a shorter one makes them do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backends.backend import Backend
from policies.features.request import RequestFeatures

_MARGIN: Final = 1.25
"""What a prompt may have in tokens, over what its text lets expect."""


def fitting(request: RequestFeatures, backends: Sequence[Backend]) -> Sequence[Backend]:
    """Return the backends whose engines take a request; those of the longest contexts if it may be too long for all.

    An engine refuses a prompt that leaves no room for an answer, and a limit above its context; a longer answer than it
    has room for it cuts. The answer is taken to be of usual length: clients set limits that answers rarely reach.
    """
    prompt = request.prompt_tokens if request.unseen is None else request.unseen.most_tokens
    answer = request.context_tokens - request.prompt_tokens
    tokens = max(_MARGIN * prompt + answer, request.max_tokens or 0)
    longest = max([one.engine.said.context_tokens for one in backends], default=0)
    least = min(tokens, longest)
    lengths = [(one, one.engine.said.context_tokens) for one in backends]
    return [one for one, tokens in lengths if not tokens or tokens >= least]
