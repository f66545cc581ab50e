"""Requests beyond a drafter's limit: the replicas that they are kept away from, under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from backends.backend import Candidate
from backends.drafter_limit import Beyond, DrafterLimit
from policies.features.request import RequestFeatures
from policies.load import per_weight

C = TypeVar("C", bound=Candidate)

_SLACK: Final = 8.0
_RATIO: Final = 1.25
"""As `spill` of `thresholds`: requests on a replica beyond which it has much more to do than the others."""


def surviving(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates whose engine a request does not end, or all if there is none.

    A request may reach the longest answer that it allows, and have as long a prompt as is not known of it.
    """
    tokens = request.most_context_tokens
    exceeded = [(one, _exceeded(one, tokens)) for one in candidates]
    return [one for one, limit in exceeded if limit is None or limit.beyond is not Beyond.CRASH] or candidates


def sparing(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates for a request that would take the drafts of those beside it on some of them.

    Those where it does not, while they have not much more to do than the others. Beyond that, such requests gather: on
    the first of the others, by the order of the pool, that has not much more to do either.
    """
    tokens = request.most_context_tokens if request.is_unknown else request.context_tokens
    harmed = [one for one in candidates if (limit := _exceeded(one, tokens)) is not None and limit.harms_others]
    if not harmed:
        return candidates
    groups = [[one for one in candidates if one not in harmed], *[[one] for one in harmed]]
    return next(group for group in groups if group and has_room(group, candidates))


def has_room(group: Sequence[C], candidates: Sequence[C]) -> bool:
    """Return whether some of the candidates have not much more to do than the others."""
    least, least_of_all = (min([per_weight(one, one.in_flight) for one in each]) for each in (group, candidates))
    return least <= _SLACK + _RATIO * least_of_all


def _exceeded(candidate: Candidate, tokens: int) -> DrafterLimit | None:
    """Return the limit of a candidate's drafter if so long a context is beyond it."""
    limit = candidate.drafter_limit
    return limit if limit is not None and tokens > limit.tokens else None
