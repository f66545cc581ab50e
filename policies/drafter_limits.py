"""Requests beyond a drafter's limit: the replicas that they are kept away from, under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from backends.backend import Candidate
from backends.drafter_limit import Beyond
from policies.features.request import RequestFeatures
from policies.load import per_weight

C = TypeVar("C", bound=Candidate)

_CRASH: Final = Beyond.CRASH
_SLACK: Final = 8.0
_RATIO: Final = 1.25
"""As `spill` of `thresholds`: requests on a replica beyond which it has much more to do than the others."""


def surviving(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates whose engine a request does not end, or all if there is none.

    A request may reach the longest answer that it allows.
    """
    tokens = max(request.context_tokens, request.prompt_tokens + (request.max_tokens or 0))
    kept: list[C] = []
    for candidate in candidates:
        limit = candidate.drafter_limit
        if limit is None or limit.beyond is not _CRASH or tokens <= limit.tokens:
            kept.append(candidate)
    return kept or candidates


def sparing(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates for a request that would take the drafts of those beside it on some of them.

    Those where it does not, while they have not much more to do than the others. Beyond that, such requests gather: on
    the first of the others, by the order of the pool, that has not much more to do either.
    """
    harmed: list[C] = []
    for candidate in candidates:
        limit = candidate.drafter_limit
        if limit is not None and limit.harms_others and request.context_tokens > limit.tokens:
            harmed.append(candidate)
    if not harmed:
        return candidates
    bound = _SLACK + _RATIO * min([per_weight(one, one.in_flight) for one in candidates])
    unharmed = [one for one in candidates if one not in harmed]
    for group in (unharmed, *[[one] for one in harmed]):
        for one in group:
            if per_weight(one, one.in_flight) <= bound:
                return group
    return candidates
