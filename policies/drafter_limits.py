"""Requests beyond a drafter's limit: the replicas that they are kept away from, under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from backends.backend import Candidate
from backends.drafter_limit import Beyond
from policies.features.request import RequestFeatures
from policies.load import per_weight

C = TypeVar("C", bound=Candidate)

_ENDING: Final = (Beyond.CRASH,)
_HARMFUL: Final = (Beyond.BATCH, Beyond.CRASH)
_SLACK: Final = 8.0
_RATIO: Final = 1.25
"""As `spill` of `thresholds`: requests on a replica beyond which it has much more to do than the others."""


def surviving(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates whose engine a request does not end, or all if there is none.

    A request may reach the longest answer that it allows.
    """
    tokens = max(request.context_tokens, request.prompt_tokens + (request.max_tokens or 0))
    return [one for one in candidates if not _is_beyond(one, tokens, _ENDING)] or candidates


def sparing(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates for a request that would take the drafts of those beside it on some of them.

    Those where it does not, while they have not much more to do than the others. Beyond that, such requests gather: on
    the first of the others, by the order of the pool, that has not much more to do either.
    """
    tokens = request.context_tokens
    harmed = [one for one in candidates if _is_beyond(one, tokens, _HARMFUL)]
    if not harmed:
        return candidates
    unharmed = [one for one in candidates if one not in harmed]
    loads = {one.name: per_weight(one, one.in_flight) for one in candidates}
    bound = _SLACK + _RATIO * min(loads.values())
    groups = [unharmed, *[[one] for one in harmed]]
    return next(group for group in groups if min([loads[one.name] for one in group], default=bound + 1.0) <= bound)


def _is_beyond(candidate: Candidate, tokens: int, kinds: tuple[Beyond, ...]) -> bool:
    limit = candidate.drafter_limit
    return limit is not None and tokens > limit.tokens and limit.beyond in kinds
